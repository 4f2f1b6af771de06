"""Floor 2: a model in PyTorch that computes what a static int8 artifact computes, so that it can be trained.

A layer of the recipe answers, as `convert.static_int8` writes it,

    y = round8((x - shift) * multiplier) @ round8(W / multiplier) + x[outliers] @ W[outliers] + (b + shift @ W - moved)

with the recipe's own scales and one scale for each column of the weight, its largest value over the largest integer.
Rounding lets gradients through as if it were not there (the straight-through estimator, arXiv:1308.3432); what a scale
is to be is learned from what rounding with it loses (LSQ, arXiv:1902.08153). Shift, multiplier, scale and what is taken
off the bias are a recipe's own numbers: trained alone they need no other weights. How it is trained is `distil`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from nlpconvert.errors import UsageError
from nlpconvert.recipe import Layer, Recipe

LOWEST, HIGHEST = -128, 127
"""What an activation in 8 bits can be, its zero point taken off: the same for int8 and uint8."""

Forward = Callable[..., torch.Tensor]


def rounded(values: torch.Tensor, scale: torch.Tensor, lowest: int, highest: int) -> torch.Tensor:
    """values to the nearest scale * (lowest ... highest), halves to the even one; gradients go straight through what
    was not clipped, and to the scale go as LSQ has them."""
    whole = torch.clamp(values / scale, lowest, highest)
    return (whole + (torch.round(whole) - whole).detach()) * scale


class Site(torch.nn.Module):
    """How the input that one or more layers share is prepared: the numbers of `integers.Preparation`, to be trained."""

    def __init__(
        self, shift: np.ndarray, multiplier: np.ndarray, scale: float, outliers: Sequence[int], device: torch.device
    ) -> None:
        super().__init__()
        self.inside = torch.tensor(multiplier != 0, device=device)
        self.outliers = torch.tensor(list(outliers), dtype=torch.long, device=device)
        self.shift = torch.nn.Parameter(torch.tensor(shift, device=device))
        safe = np.where(multiplier != 0, multiplier, 1).astype(np.float64)
        self.log_multiplier = torch.nn.Parameter(torch.tensor(np.log(safe), dtype=torch.float32, device=device))
        self.log_scale = torch.nn.Parameter(torch.tensor(np.log(scale), dtype=torch.float32, device=device))
        # exp(log(x)) is not always x: what was not trained is to be the artifact's to the bit.
        self._first = (self.log_multiplier.detach().clone(), self.log_scale.detach().clone())
        self._given = (torch.tensor(multiplier, device=device), torch.tensor(scale, dtype=torch.float32, device=device))
        self.mean = torch.zeros_like(self.shift)
        self.seeing = False
        self._tokens = 0
        self._seen: tuple[torch.Tensor, torch.Tensor] | None = None

    def multiplier(self) -> torch.Tensor:
        """(channels,): 0 for outliers."""
        ratio = torch.exp(self.log_multiplier - self._first[0])
        return torch.where(self.inside, self._given[0] * ratio, torch.zeros_like(ratio))

    def scale(self) -> torch.Tensor:
        """One number above 0."""
        return self._given[1] * torch.exp(self.log_scale - self._first[1])

    def prepared(self, x: torch.Tensor) -> torch.Tensor:
        """x shifted, multiplied and rounded; of a tensor that several layers read, once."""
        if self._seen is None or self._seen[0] is not x:
            if self.seeing:
                self._see(x.detach().reshape(-1, x.shape[-1]))
            moved = (x - self.shift) * self.multiplier()
            self._seen = x, rounded(moved, self.scale(), LOWEST, HIGHEST)
        return self._seen[1]

    def _see(self, rows: torch.Tensor) -> None:
        self._tokens += len(rows)
        self.mean += (rows.mean(0) - self.mean) * (len(rows) / self._tokens)

    def middle(self) -> torch.Tensor:
        """(channels,): the mean input, prepared and not rounded."""
        return (self.mean - self.shift) * self.multiplier()

    @torch.no_grad()
    def steps(self) -> torch.Tensor:
        """How far a channel is from one integer to the next, the median."""
        return (self.scale() / self.multiplier()[self.inside]).median()

    def forget(self) -> None:
        """Lets go of the last input."""
        self._seen = None


class Linear(torch.nn.Module):
    """One layer in integers. `weight` is (inputs, outputs), as the graph has it."""

    def __init__(self, site: Site, weight: torch.Tensor, bias: torch.Tensor | None, moved: torch.Tensor, largest: int):
        super().__init__()
        self._site = (site,)  # in a tuple: it is registered once, where all its layers find it
        self.weight = torch.nn.Parameter(weight)
        self.moved = torch.nn.Parameter(moved)
        self.bias, self.largest = bias, largest
        self._first: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., inputs) to (..., outputs)."""
        (site,) = self._site
        whole = self._rounded()
        answer = site.prepared(x) @ whole
        if len(site.outliers):
            answer = answer + x[..., site.outliers] @ self.weight[site.outliers]
        offset = site.shift @ self.weight - self._taken_off(whole)
        return answer + (offset if self.bias is None else offset + self.bias)

    def _rounded(self) -> torch.Tensor:
        """The weight with the multiplier taken out again, rounded column by column: zero for outliers."""
        (site,) = self._site
        back = torch.where(site.inside, 1 / torch.where(site.inside, site.multiplier(), 1.0), 0.0)
        folded = self.weight * back[:, None]
        largest = folded.abs().amax(0)
        scale = torch.where(largest > 0, largest / self.largest, torch.ones_like(largest))
        return rounded(folded, scale, -self.largest, self.largest)

    def _taken_off(self, whole: torch.Tensor) -> torch.Tensor:
        """(outputs,): what rounding moves the answer to the mean input follows the weights while they are trained, so
        that the answers' mean stays where it was."""
        return self.moved if self._first is None else self.moved + self._moves(whole) - self._first

    def _moves(self, whole: torch.Tensor) -> torch.Tensor:
        """What the answer to the mean input is moved by rounding the weight."""
        (site,) = self._site
        inside = torch.where(site.inside, site.mean - site.shift, 0.0)
        return site.middle() @ whole - inside @ self.weight

    @torch.no_grad()
    def center(self) -> None:
        """From now on `moved` is what is taken off besides what the mean input's own rounding has come to move."""
        self._first = self._moves(self._rounded())

    @torch.no_grad()
    def taken_off(self) -> np.ndarray:
        """What is taken off the bias in all: (outputs,), as a recipe has it."""
        found: np.ndarray = self._taken_off(self._rounded()).cpu().numpy()
        return found

    def forget(self) -> None:
        """Lets go of the last input."""
        self._site[0].forget()


@dataclass(frozen=True)
class Kept:
    """A module whose own forward was replaced, and how it went."""

    module: torch.nn.Module
    own: object
    """What stood in the instance itself; None where its class's was called."""


class FakeQuantized(torch.nn.Module):
    """A loaded model that answers as the artifact of a recipe does while it is `quantized`, as itself otherwise.

    Weights of the model are not touched: what is trained are copies. UsageError where a layer of the recipe is none of
    the model's linear layers.
    """

    def __init__(self, model: torch.nn.Module, made: Recipe) -> None:
        super().__init__()
        self._model = (model,)
        self._recipe = made
        self._on = False
        self._replaced: list[Kept] = []
        self._left: frozenset[str] = frozenset()
        self.sites = torch.nn.ModuleDict()
        self.layers = torch.nn.ModuleDict()
        self.norms = torch.nn.ModuleDict()
        device = next(model.parameters()).device
        modules = dict(model.named_modules())
        for layer in quantized_layers(made):
            given = made.sites[layer.site]
            key = _key(layer.site)
            if key not in self.sites:
                self.sites[key] = Site(given.shift, given.multiplier, given.scale, given.outliers, device)
            module = modules.get(layer.name)
            if module is None:
                raise UsageError(f"{layer.name} is no module of the model: its layer cannot be trained in PyTorch")
            self._add(layer, module, self.sites[key])  # type: ignore[arg-type]
        for name, module in modules.items():
            if _is_norm(module):
                norm = torch.nn.ParameterDict(
                    {each: torch.nn.Parameter(value.detach().clone()) for each, value in module.named_parameters()}
                )
                self.norms[_key(name)] = norm
                self._replace(module, _with_weights(module, norm))

    def _add(self, layer: Layer, module: torch.nn.Module, site: Site) -> None:
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        transposed = isinstance(module, torch.nn.Linear)
        if not isinstance(weight, torch.Tensor) or not (transposed or type(module).__name__ == "Conv1D"):
            kind = type(module).__name__
            raise UsageError(f"{layer.name} is a {kind}, no linear layer: it cannot be trained in PyTorch")
        matrix = (weight.T if transposed else weight).detach().clone().contiguous()
        if matrix.shape[0] != len(site.shift):
            raise UsageError(f"the recipe's scales of {layer.name} are for {len(site.shift)} channels, not for these")
        moved = np.zeros(matrix.shape[1], np.float32) if layer.bias is None else layer.bias
        moved_off = torch.tensor(moved, device=matrix.device)
        made = Linear(site, matrix, None if bias is None else bias.detach(), moved_off, self._recipe.largest)
        self.layers[_key(layer.name)] = made
        self._replace(module, made)

    def _replace(self, module: torch.nn.Module, quantized: Forward) -> None:
        own = module.forward
        self._replaced.append(Kept(module, vars(module).get("forward")))
        module.forward = lambda *args, **named: (quantized if self._on else own)(*args, **named)

    def close(self) -> None:
        """Gives the model its own forwards back."""
        for kept in self._replaced:
            vars(kept.module).pop("forward", None)
            if kept.own is not None:
                vars(kept.module)["forward"] = kept.own
        self._replaced.clear()

    # -- answers ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def quantized(self) -> Iterator[None]:
        """While it lasts, the model answers as the artifact."""
        self._on = True
        try:
            yield
        finally:
            self._on = False
            for site in self.sites.values():
                site.forget()  # type: ignore[operator]

    def answers(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The artifact's outputs by name, with gradients where those are on."""
        with self.quantized():
            given: dict[str, torch.Tensor] = self._model[0](**batch)
        return given

    @torch.no_grad()
    def reference(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The float32 model's outputs by name."""
        given: dict[str, torch.Tensor] = self._model[0](**batch)
        return given

    @torch.no_grad()
    def run(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The artifact's outputs, arrays in and out: what a session of a runtime gives."""
        device = next(self.parameters()).device
        given = self.answers({name: torch.tensor(array, device=device) for name, array in batch.items()})
        return {name: value.cpu().numpy() for name, value in given.items()}

    @torch.no_grad()
    def layer(self, name: str, x: np.ndarray, biased: bool = True) -> np.ndarray:
        """What one layer answers, with its bias or without: (..., inputs) to (..., outputs)."""
        made: Linear = self.layers[_key(name)]  # type: ignore[assignment]
        answer = made(torch.tensor(x, device=made.weight.device))
        made.forget()
        if made.bias is not None and not biased:
            answer = answer - made.bias
        given: np.ndarray = answer.cpu().numpy()
        return given

    def center(self, batches: Iterable[Mapping[str, np.ndarray]]) -> None:
        """Looks at the mean of every layer's input, so that training does not move its answers on average."""
        sites = [site for site in self.sites.values() if isinstance(site, Site)]
        for site in sites:
            site.seeing = True
        for batch in batches:
            self.run(batch)
        for site in sites:
            site.seeing = False
        for layer in self.layers.values():
            assert isinstance(layer, Linear)
            layer.center()

    # -- what is trained ----------------------------------------------------------------------------------------------

    def leave(self, names: Collection[str]) -> None:
        """Weights that are not to be trained, by the names of `trained`: they answer as the model's own."""
        self._left = frozenset(names)

    def weights(self) -> list[torch.nn.Parameter]:
        """Matrices of the layers and vectors of normalisation."""
        return [each for name, each in self._weights() if name not in self._left]

    def scales(self) -> list[tuple[torch.nn.Parameter, float]]:
        """Scales, multipliers, shifts, and what is taken off the biases, each with the size of a change of it that is
        one of a whole in a logarithm."""
        found: list[tuple[torch.nn.Parameter, float]] = []
        for site in self.sites.values():
            assert isinstance(site, Site)
            found += [(site.log_scale, 1.0), (site.log_multiplier, 1.0), (site.shift, float(site.steps()))]
        for layer in self.layers.values():
            assert isinstance(layer, Linear)
            found.append((layer.moved, float(layer.weight.detach().square().mean().sqrt())))
        return found

    def _weights(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for layer in quantized_layers(self._recipe):
            yield layer.name, self.layers[_key(layer.name)].weight  # type: ignore[misc]
        for name, norm in self.norms.items():
            for each, value in norm.named_parameters():
                yield f"{name.replace('/', '.')}.{each}", value

    def recipe(self) -> Recipe:
        """The recipe with the numbers that were trained."""
        sites, layers = dict(self._recipe.sites), []
        for name, before in self._recipe.sites.items():
            if _key(name) not in self.sites:
                continue
            site: Site = self.sites[_key(name)]  # type: ignore[assignment]
            with torch.no_grad():
                sites[name] = replace(
                    before,
                    shift=site.shift.cpu().numpy().copy(),
                    multiplier=site.multiplier().cpu().numpy().copy(),
                    scale=float(site.scale()),
                )
        for layer in self._recipe.layers:
            made = self.layers[_key(layer.name)] if layer.precision == "int8" else None
            layers.append(replace(layer, bias=made.taken_off()) if isinstance(made, Linear) else layer)
        return replace(self._recipe, sites=sites, layers=tuple(layers))

    def trained(self) -> dict[str, np.ndarray]:
        """The weights as they are now: matrices (inputs, outputs) by the layer's module path, vectors by their own."""
        return {name: value.detach().cpu().numpy().copy() for name, value in self._weights() if name not in self._left}


def quantized_layers(made: Recipe) -> list[Layer]:
    """The layers whose products are in integers."""
    return [layer for layer in made.layers if layer.precision == "int8"]


def _key(name: str) -> str:
    """A module path as a key that torch takes."""
    return name.replace(".", "/")


def _is_norm(module: torch.nn.Module) -> bool:
    """Whether a module only normalises: a vector of weights, nothing below it."""
    weight = getattr(module, "weight", None)
    return (
        "Norm" in type(module).__name__
        and isinstance(weight, torch.nn.Parameter)
        and weight.ndim == 1
        and not list(module.children())
    )


def _with_weights(module: torch.nn.Module, weights: torch.nn.ParameterDict) -> Forward:
    """The module's own forward with other weights in their place."""
    own = module.forward

    def forward(*args: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        before = dict(module._parameters)
        module._parameters.update(dict(weights.items()))
        try:
            answer: torch.Tensor = own(*args, **named)
            return answer
        finally:
            module._parameters.update(before)

    return forward
