"""How fast is what was converted, beside its verdict, and how should it be batched? `benching` brings it together.

`timing` is the clock's rule, `asking` what is asked, `policies` and `queueing` how texts and requests become batches;
`worker` and `child` run each artifact in a process of its own.
"""
