"""Floor 4: which module moved first, as lines for a person and as a plot. Data in, lines and SVG out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from nlpconvert.validators.located import NOISE, Located, Moved

SHOWN = 10
"""Modules in the table, those that introduce most (else, where most arrives), in the order in which they run."""
NAMED = 6
"""Modules that could not be matched, named in a line."""
IN_ORDER = "in the order in which they run"
BAR, GAP, LABEL, SIDE = 12, 4, 11, 320  # of the plot, in points


# -- lines -------------------------------------------------------------------------------------------------------------


def lines(located: Located, verbose: bool = False) -> Iterator[str]:
    """The answer, then the modules that introduce most in the order in which they run; `verbose`: all of them."""
    yield _headline(located)
    yield ""
    shown = located.modules if verbose else _most(located.modules)
    width = max([len(IN_ORDER), *(len(each.module) for each in shown)])
    left_out = len(located.modules) - len(shown)
    yield f"  {IN_ORDER:<{width}}  introduced  arrives"
    marks = (("first to move", located.first), ("most", located.most))
    for each in shown:
        words = [word for word, module in marks if each.module == module and each == located.of(module)]
        mark = f"  {', '.join(words)}" if words else ""
        drifts = f"{_number(each.introduced):<10}  {_number(each.arrives)}"
        yield f"  {each.module:<{width}}  {drifts}{mark}"
    if left_out:
        yield f"  {left_out:,} more that moved less"
    yield ""
    for label, module in marks if located.first != located.most else marks[:1]:
        found = located.of(module)
        if found is not None:
            yield f"  {label:<16} {_said(found)}"
    if located.outputs:
        arrived = ", ".join(f"{name} {_number(value)}" for name, value in located.outputs.items())
        yield f"  {'at the outputs':<16} {arrived} of their size"
    if located.unmatched:
        yield f"  {'not matched':<16} {_unmatched(located.unmatched, verbose)}"
    for note in located.notes:
        yield f"  {'note':<16} {note}"
    yield f"  {'asked':<16} {_count(len(located.cases), 'case')}: {', '.join(located.cases)}"


def first_to_move(located: Located) -> str:
    """The answer in one line, for a report on a step: `encoder.layer.3.output.dense (introduced 2.2e-02 of it)`."""
    found = located.of(located.first)
    if found is None:
        return f"none of {_count(len(located.modules), 'tensor')} by more than {_number(NOISE)} of its size"
    most = located.of(located.most)
    line = f"{found.module} (introduced {_number(found.introduced)} of it)"
    if most is not None and most.module != found.module:
        line += f", most in {most.module} ({_number(most.introduced)})"
    return line


def _headline(located: Located) -> str:
    pair = f"{located.step} against {located.against}"
    count = _count(len(located.modules), "tensor")
    if located.first is None:
        return f"{pair}: nothing moved, in {count} none introduced more than {_number(NOISE)} of its size"
    if located.stands_out:
        return f"{pair}: {located.first} moved first"
    moved = sum(each.introduced > NOISE for each in located.modules)
    return f"{pair}: {moved:,} of {count} moved, none far more than its peers; most in {located.most}"


def _most(modules: Sequence[Moved]) -> list[Moved]:
    # Below the noise what a module introduces says nothing; what arrives there shows how far it got.
    ranked = sorted(modules, key=lambda each: (each.introduced > NOISE and -each.introduced, -each.arrives))[:SHOWN]
    return [each for each in modules if each in ranked]


def _said(found: Moved) -> str:
    if found.nonfinite:
        return f"{found.module} ({_count(found.nonfinite, 'element')} not finite on one side alone)"
    where = f"; worst {_number(found.worst_abs)} at {list(found.worst_index)} of {list(found.shape)}"
    return f"{found.module} (introduced {_number(found.introduced)} of it{where}, case {found.worst_case})"


def _unmatched(names: Sequence[str], verbose: bool) -> str:
    shown = names if verbose else names[:NAMED]
    more = f" and {len(names) - len(shown):,} more" if len(names) > len(shown) else ""
    return f"{_count(len(names), 'module')}, of which nothing can be said: {', '.join(shown)}{more}"


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}" if math.isfinite(value) else "not finite"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


# -- the plot ----------------------------------------------------------------------------------------------------------


def plot(located: Located, name: str = "located") -> str:
    """A stand-alone SVG: every module by name from top to bottom in the order in which they run, what it introduces as
    a bar and what arrives as a line, on a log scale. `name` tells its ids from another plot's.
    """
    import io

    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    modules = located.modules
    values = [value for each in modules for value in (each.introduced, each.arrives) if 0 < value < math.inf]
    low = 10.0 ** math.floor(math.log10(min(values, default=NOISE / 100)))
    high = 10.0 ** math.ceil(math.log10(max(values, default=NOISE)) + 0.01)

    def drawn(value: float) -> float:
        return min(max(value, low), high)

    places = range(len(modules))
    widest = max((len(each.module) for each in modules), default=1)
    points = len(modules) * (BAR + GAP) + 70
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none", "font.size": LABEL - 2}):
        figure = Figure(figsize=((SIDE + widest * 5.2) / 72, points / 72), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        marked = {located.first, located.most} - {None}
        colours = ["#c0392b" if each.module in marked else "#5b7fa6" for each in modules]
        axes.barh(places, [drawn(each.introduced) for each in modules], color=colours, height=0.7, label="introduced")
        axes.plot([drawn(each.arrives) for each in modules], places, color="#444444", linewidth=1, label="arrives")
        axes.set_xscale("log")
        axes.set_xlim(low, high)
        axes.set_ylim(max(len(modules), 1) - 0.5, -0.5)
        axes.set_yticks(places, [each.module for each in modules])
        axes.set_xlabel("|candidate - reference| / |reference|")
        axes.set_title(f"{located.step} against {located.against}", loc="left")
        axes.legend(loc="best", frameon=False)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    return text[text.index("<svg") :]
