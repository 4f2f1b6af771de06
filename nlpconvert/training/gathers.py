"""Floor 2: takes GatherGrad out of a gradient graph, as a hook over the finished graph.

GatherGrad adds rows under a lock, in whatever order its threads come: with more than one thread no two runs have the
same bits. Its summands become an output, and PyTorch adds them, in order and faster. It also adds to the row of the
padding token, whose gradient PyTorch leaves at 0.
"""

from __future__ import annotations

import onnx

from nlpconvert.training.graph import GradientGraph, Scatter


def take_out(graph: GradientGraph) -> None:
    """Every GatherGrad along the first axis whose answer is a parameter's gradient, or one summand of it, is taken out.

    What is looked up elsewhere than in a parameter stays (a pooler's first token: each row is added once).
    """
    proto = graph.model.graph
    parameters = {output: name for name, output in graph.gradients.items()}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in proto.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    gone: list[onnx.NodeProto] = []
    for node in proto.node:
        if node.op_type != "GatherGrad" or any(each.name == "axis" and each.i for each in node.attribute):
            continue
        made, reading = node.output[0], readers.get(node.output[0], [])
        if made in parameters:
            parameter = parameters[made]
            del graph.gradients[parameter]
        elif len(reading) == 1 and reading[0].op_type == "Sum" and reading[0].output[0] in parameters:
            parameter = parameters[reading[0].output[0]]
            reading[0].input.remove(made)
            if not reading[0].input:
                gone.append(reading[0])
                del graph.gradients[parameter]
        else:
            continue
        gone.append(node)
        graph.scatters.append(Scatter(parameter, indices=node.input[1], values=node.input[2]))
    for node in gone:
        proto.node.remove(node)
    _outputs(graph)


def _outputs(graph: GradientGraph) -> None:
    """The graph gives what is scattered, and no longer what nothing makes."""
    proto = graph.model.graph
    made = {name for node in proto.node for name in node.output}
    kept = [output for output in proto.output if output.name in made]
    have = {each.name for each in (*kept, *proto.input)}
    for scatter in graph.scatters:
        for name, kind in ((scatter.indices, onnx.TensorProto.INT64), (scatter.values, onnx.TensorProto.FLOAT)):
            if name not in have:
                kept.append(onnx.helper.make_tensor_value_info(name, kind, None))
                have.add(name)
    del proto.output[:]
    proto.output.extend(kept)
