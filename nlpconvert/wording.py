"""Floor 4: how numbers, bounds and places are worded, the same in every report."""

from __future__ import annotations

from nlpconvert.validators.findings import Element, OutputDiff


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def share(part: int, whole: int) -> str:
    """A share in brackets; what is not none never reads as none."""
    if not part or not whole:
        return ""
    return f" ({part / whole:.3%})" if part / whole >= 1e-5 else " (under 0.001%)"


def drift(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def cosine(value: float) -> str:
    """What is not exactly 1 never reads as 1."""
    return "1" if value == 1 else f"{min(value, 0.9999999):.7f}"


def measured(measure: str, value: float) -> str:
    if measure == "cosine":
        return f"cosine {cosine(value)}"
    if measure == "changed":
        return f"changed {value:.2%}"
    if measure == "nonfinite":
        return f"{count(int(value), 'element')} not finite"
    return f"{measure} {drift(value)}"


def percent(share: float) -> str:
    """What is not all never reads as all."""
    return "100%" if share == 1 else f"{min(share, 0.99999):.3%}"


def size(count: int) -> str:
    """Bytes for a person, in decimal units as file managers show them."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5 or unit == "GB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" or value >= 99.95 else f"{value:.1f} {unit}"


def used(share: float) -> str:
    """How far a verdict is from turning: "41% of what is allowed"; past the bound "2.3 times what is allowed"."""
    if share > 1:
        return f"{share:,.0f} times what is allowed" if share >= 100 else f"{share:.3g} times what is allowed"
    return f"{'0%' if share == 0 else 'under 1%' if share < 0.01 else f'{share:.0%}'} of what is allowed"


def allowed(output: OutputDiff) -> str:
    """The rule in force, as a formula or a sentence."""
    tolerance = output.tolerance
    if tolerance.measure == "rel":
        mean = f"{output.scale:.3g}"
        rule = f"|candidate - reference| <= {tolerance.value:.1e} * ({mean} + |reference|)"
        if tolerance.multiple is not None:
            return f"{rule}   {tolerance.multiple:g} times the reference's own noise"
        return f"{rule}   {mean}: the reference's root mean square"
    rules = {
        "abs": f"|candidate - reference| <= {tolerance.value:.1e}",
        "cosine": f"cosine of every {output.unit} >= {tolerance.value!r}",
        "changed": f"top-1 changed in <= {tolerance.text.removeprefix('changed<=')} of the {output.unit}s",
        "kl": f"mean KL(reference || candidate) <= {tolerance.value!r} nats",
    }
    return rules[tolerance.measure]


def place(element: Element) -> str:
    return (
        f"{list(element.index)}   reference {element.reference:.5g}   candidate {element.candidate:.5g}   "
        f"case {element.case}"
    )
