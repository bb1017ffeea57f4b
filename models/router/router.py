"""Which adapter answers a task, decided once from its first observation.

Linear: of the successes that are expected from the base model's hidden states, the highest decides
(`models/router/regression.py`). The base model alone is a class of its own (""), so that the router knows when no
adapter should be used.
Retrieval: the nearest training episodes by the same hidden states vote, weighted by similarity.
Label: the base model reads a letter per candidate (`models/router/label_prompt.py`).
It abstains (no adapter) from a class that is less probable than validation showed to be worth it. A request further
from every training episode than any of them is from the others is unlike all of them, and no neighbour of it says
anything: it gets the one class that was found to do best on what it was not made for, or no adapter. A regression
goes on beyond its examples: where there is such a class it decides there, too, if it is sure enough of another.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from environments.contract import content_hash
from errors import ConfigurationError, StoreError
from models.adapters.files import flush
from models.local.policy import LocalPolicy
from models.renderer import Renderer
from models.router.first_observation import LAYERS, Opening, embed_openings
from models.router.label_prompt import Candidate, label_probabilities
from models.router.regression import expect, sharpness, softmax

MODES = ("linear", "retrieval", "label", "both", "fixed", "off")
# The mode of a conversation whose client named who is to answer: no router was asked.
ASKED = "asked"
# Share of the probability that is spread evenly over all classes, so that none is impossible.
SMOOTHING = 0.01
# How far apart, in cosine, the same opening may come out in two batches: where all of a family open alike, nothing else
# lies between a request and them, and it is not unlike them for that.
ROUNDING = 0.02
# How many times as probable as the adapter that is proven beyond its own families another class has to be, for what no
# example is like: there a regression goes on where it has seen nothing (benchmarks/findings/router.md).
SURER = 2.0
TEMPERATURES = tuple(float(t) for t in np.geomspace(0.003, 1.0, 24))
VECTORS, FIELDS = "router.safetensors", "router.json"
TUPLES = ("labels", "ids", "layers", "weights", "offsets")


@dataclass(frozen=True)
class RouteDecision:
    """`capability` whose adapter answers ("" = the base model alone), the probabilities of all classes, the ids of the
    nearest examples (nearest first; by votes they decide, else they are told), the milliseconds that deciding took (a
    batch's time divided evenly), the mode, and whether it is unlike all that the router was fitted on."""

    capability: str
    probabilities: Mapping[str, float]
    neighbours: tuple[str, ...]
    milliseconds: float
    mode: str
    unlike: bool = False

    def mixture(self, p: float) -> dict[str, float]:
        """The smallest set of classes with cumulative probability > p, renormalised; {"": 1.0} if the base model
        alone is the most probable. A weight on "" means that much of no adapter. What is unlike all is not blended."""
        if not 0.0 <= p < 1.0:
            raise ConfigurationError(f"p is {p}; give 0 <= p < 1 (0 keeps the most probable class only)")
        if self.unlike or not self.capability:
            return {self.capability: 1.0}
        kept: dict[str, float] = {}
        for name, probability in sorted(self.probabilities.items(), key=lambda item: (-item[1], item[0])):
            kept[name] = probability
            if sum(kept.values()) > p:
                break
        total = sum(kept.values())
        return {name: probability / total for name, probability in kept.items()}


@dataclass(frozen=True, eq=False)
class Router:
    """Made by `Router.fit`, `Router.always` or `Router.load`; `replace`d to change the mode (`with_mode`).

    `vectors` (n, d) are the centred training vectors of length 1, `centre` (d,) the mean that was taken off. `weights`
    say how many votes a row has (empty: each one). `source`
    names the base model that the vectors come from (a `PolicyIdentity.id`); "" is not checked. A request whose nearest
    training row has a similarity below `near` is answered by `unlike` ("": no adapter; else a linear one decides there
    for another that is SURER times as probable); none is chosen by a probability below `certain`. `slopes` (d, classes)
    and `offsets` (classes,) give the success that is expected of each class on a vector less `centre`, and `sharpness`
    is its factor in the exponent of a probability (`expecting` sets all three).
    """

    mode: str
    candidates: tuple[Candidate, ...] = ()
    vectors: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.float32))
    centre: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    labels: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    neighbours: int = 5
    temperature: float = 0.1
    layers: tuple[int, int] = LAYERS
    source: str = ""
    fixed: str = ""
    near: float = -1.0
    certain: float = 0.0
    unlike: str = ""
    weights: tuple[float, ...] = ()
    slopes: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.float32))
    offsets: tuple[float, ...] = ()
    sharpness: float = 1.0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigurationError(f"router mode {self.mode!r} does not exist; choose from {', '.join(MODES)}")
        if self.mode == "linear" and not self.offsets:
            raise ConfigurationError(
                "this router was fitted without the successes of its classes; take retrieval, or fit it with expecting"
            )
        if self.mode in ("retrieval", "label", "both") and not self.candidates:
            raise ConfigurationError(f"a router of mode {self.mode!r} needs training rows; make it with Router.fit")
        if self.mode == "fixed" and not self.fixed:
            raise ConfigurationError('a router of mode "fixed" needs a capability; use Router.always(capability)')

    @classmethod
    def fit(cls, embeddings: np.ndarray, labels: Sequence[str], ids: Sequence[str], neighbours: int = 5) -> Router:
        """A retrieval router on training vectors (n, d): centres them, and fits the temperature of the votes on
        leave-one-out log-loss. `labels` are capabilities, "" where the base model needs no adapter."""
        rows = np.asarray(embeddings, dtype=np.float32)
        if rows.ndim != 2 or not len(rows) == len(labels) == len(ids):
            raise ConfigurationError(
                f"vectors {rows.shape}, {len(labels)} labels, {len(ids)} ids; give one of each per row"
            )
        if len(rows) < 2 or neighbours < 1:
            raise ConfigurationError(
                f"{len(rows)} rows and {neighbours} neighbours; give at least 2 rows and 1 neighbour"
            )
        if not np.isfinite(rows).all():
            raise ConfigurationError("a training vector is not finite; look at the base model that made it")
        centre = rows.mean(axis=0)
        router = cls(
            "retrieval",
            tuple(Candidate(name) for name in sorted(set(labels), key=lambda n: (not n, n))),
            unit(rows - centre),
            centre,
            tuple(labels),
            tuple(ids),
            neighbours,
        )
        return replace(router, temperature=router._best_temperature(), near=router._nearest_apart())

    @classmethod
    def always(cls, capability: str = "") -> Router:
        """A router that gives every task `capability`'s adapter; "" never uses one."""
        return cls("fixed", fixed=capability) if capability else cls("off")

    def with_mode(self, mode: str) -> Router:
        """The same router deciding by another mode."""
        return replace(self, mode=mode)

    def insisting(self, ids: Collection[str]) -> Router:
        """The same router in which each training row of `ids` has as many votes as all neighbours of a request: what
        lies near one of them is answered as they are, unless others lie much nearer."""
        votes = tuple(float(self.neighbours) if identity in ids else 1.0 for identity in self.ids)
        return replace(self, weights=votes if set(votes) != {1.0} else ())

    def expecting(
        self, vectors: np.ndarray, successes: np.ndarray, weights: Sequence[float] | None = None
    ) -> tuple[Router, np.ndarray]:
        """The same router deciding by expected success, and what is expected of each row without it, (n, classes).

        From rows of its own kind: `vectors` (n, d), `successes` (n, classes) in the order of its classes, NaN where one
        did not play, and how many times each row counts. Raises `ConfigurationError` as `regression.expect` does."""
        found = expect(np.asarray(vectors, dtype=np.float32) - self.centre, successes, weights)
        router = replace(
            self,
            mode="linear",
            slopes=found.slopes.astype(np.float32),
            offsets=tuple(float(o) for o in found.offsets),
            sharpness=sharpness(found.left_out, successes),
        )
        return router, found.left_out

    def described(self, candidates: Sequence[Candidate]) -> Router:
        """The same router with descriptions and examples for the label prompt; the classes stay those of `fit`."""
        given = {c.capability: c for c in candidates}
        unknown = sorted(given.keys() - set(self.classes))
        if unknown:
            raise ConfigurationError(
                f"candidate {unknown[0]!r} has no training row (classes: {self.classes}); fit it first"
            )
        return replace(self, candidates=tuple(given.get(c.capability, c) for c in self.candidates))

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes in the order of the probability columns; "" last."""
        return tuple(c.capability for c in self.candidates)

    def retrieve(self, embeddings: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Class probabilities (n, classes) and nearest training rows (n, k), nearest first, of vectors (n, d)."""
        rows = np.asarray(embeddings, dtype=np.float32)
        if rows.ndim != 2 or rows.shape[1] != len(self.centre):
            raise ConfigurationError(
                f"vectors {rows.shape} against training vectors of {len(self.centre)}; use the same base model"
            )
        similarity = unit(rows - self.centre) @ self.vectors.T
        nearest = nearest_columns(similarity, self.neighbours)
        return self._votes(similarity, nearest, self.temperature), nearest

    def novel(self, embeddings: np.ndarray) -> np.ndarray:
        """Which vectors (n, d) lie further from all training rows than `near` allows, (n,) of bool."""
        similarity = unit(np.asarray(embeddings, dtype=np.float32) - self.centre) @ self.vectors.T
        return np.asarray(similarity.max(axis=1) < self.near)

    def decide(
        self, embeddings: np.ndarray | None = None, label: np.ndarray | None = None, count: int = 0
    ) -> list[RouteDecision]:
        """Decisions from vectors (n, d) and calibrated label probabilities (n, classes), whichever the mode uses;
        `count` is n for modes that use neither. `milliseconds` covers this step only."""
        began = time.perf_counter()
        probabilities, nearest = np.ones((count, 1)), np.zeros((count, 0), dtype=int)
        names: tuple[str, ...] = (self.fixed,)
        novel: np.ndarray | None = None
        if self.mode in ("linear", "retrieval", "label", "both"):
            names, parts = self.classes, []
            if self.mode != "label":
                if embeddings is None:
                    raise ConfigurationError(f"mode {self.mode!r} needs vectors; call route, or embed first")
                voted, nearest = self.retrieve(embeddings)
                parts.append(self._expected(embeddings) if self.mode == "linear" else voted)
            if self.mode in ("label", "both"):
                if label is None:
                    raise ConfigurationError(f"mode {self.mode!r} needs label probabilities; call route")
                parts.append(np.asarray(label))
            product = np.prod(parts, axis=0)
            probabilities = product / product.sum(axis=1, keepdims=True)
            if embeddings is not None and self.mode != "label":
                novel = self.novel(embeddings)
            if self.mode == "label":
                nearest = np.zeros((len(product), 0), dtype=int)
        best, abstains = probabilities.argmax(axis=1), probabilities.max(axis=1) < self.certain
        unlike = np.zeros(len(best), dtype=bool) if novel is None else novel
        # Where an adapter is proven beyond its own families, a regression says better than a rule who answers what no
        # example is like, if it is sure enough; the base has it where none is.
        ruled = unlike
        if self.mode == "linear" and self.unlike:
            proven = probabilities[:, names.index(self.unlike)] if self.unlike in names else 0.0
            ruled = unlike & (probabilities.max(axis=1) < SURER * proven)
        chosen = [self.unlike if ruled[i] else "" if abstains[i] else names[best[i]] for i in range(len(best))]
        each = 1000 * (time.perf_counter() - began) / max(1, len(best))
        return [
            RouteDecision(
                chosen[i],
                {name: float(value) for name, value in zip(names, probabilities[i], strict=True)},
                tuple(self.ids[j] for j in nearest[i]),
                each,
                self.mode,
                bool(unlike[i]),
            )
            for i in range(len(best))
        ]

    def route(self, policy: LocalPolicy, renderer: Renderer, given: Sequence[Opening]) -> list[RouteDecision]:
        """Decisions for tasks as they begin, in the given order; `milliseconds` include the embedding."""
        began = time.perf_counter()
        if not given:
            return []
        if self.source and self.source != policy.identity().id:
            raise ConfigurationError(
                f"the router was fitted on base model {self.source}, this one is {policy.identity().id}; fit it again"
            )
        looked_at = self.mode in ("linear", "retrieval", "both")
        vectors = embed_openings(policy, given, self.layers) if looked_at else None
        label = None
        if self.mode in ("label", "both"):
            label = label_probabilities(policy, renderer, self.candidates, [one.text for one in given])
        decisions = self.decide(vectors, label, len(given))
        each = 1000 * (time.perf_counter() - began) / len(given)
        return [replace(decision, milliseconds=each) for decision in decisions]

    def _expected(self, embeddings: np.ndarray) -> np.ndarray:
        """(n, classes): softmax of the expected successes, smoothed."""
        rows = np.asarray(embeddings, dtype=np.float32) - self.centre
        values = rows.astype(np.float64) @ self.slopes + np.array(self.offsets)
        return (1 - SMOOTHING) * softmax(self.sharpness * values) + SMOOTHING / len(self.classes)

    def _votes(self, similarity: np.ndarray, nearest: np.ndarray, temperature: float) -> np.ndarray:
        """(n, classes): softmax of the neighbours' similarities, added up by class, smoothed."""
        values = np.take_along_axis(similarity, nearest, axis=1).astype(np.float64) / temperature
        if self.weights:
            values += np.log(np.array(self.weights)[nearest])
        weights = softmax(values)
        member, count = self._truth()[nearest], len(self.classes)
        votes = np.stack([(weights * (member == c)).sum(axis=1) for c in range(count)], axis=1)
        return (1 - SMOOTHING) * votes + SMOOTHING / count

    def _others(self) -> tuple[np.ndarray, np.ndarray]:
        """How alike the training rows are to each other (n, n), none to itself, and the nearest others (n, k)."""
        similarity: np.ndarray = self.vectors @ self.vectors.T
        np.fill_diagonal(similarity, -np.inf)
        return similarity, nearest_columns(similarity, min(self.neighbours, len(self.labels) - 1))

    def _truth(self) -> np.ndarray:
        """(n,) the columns of the training rows' labels."""
        column = {name: index for index, name in enumerate(self.classes)}
        return np.array([column[label] for label in self.labels])

    def _best_temperature(self) -> float:
        """The temperature with the least leave-one-out log-loss; the highest of equals, which claims the least."""
        others, truth, losses = self._others(), self._truth(), []
        for temperature in TEMPERATURES:
            votes = self._votes(*others, temperature)
            losses.append(round(float(-np.log(votes[np.arange(len(truth)), truth]).mean()), 9))
        return max(t for t, loss in zip(TEMPERATURES, losses, strict=True) if loss == min(losses))

    def _nearest_apart(self) -> float:
        """The similarity below which a request is unlike all training rows: a standard deviation below the least that
        any of them has to its nearest other, and at least `ROUNDING`."""
        nearest = self._others()[0].max(axis=1)
        return round(float(nearest.min() - max(nearest.std(), ROUNDING)), 6)

    def _fields(self) -> dict[str, object]:
        """Everything but the arrays, as JSON. What is as it was before it could be set leaves the version as it was."""
        later: dict[str, object] = {"near": -1.0, "certain": 0.0, "unlike": "", "weights": ()}
        later |= {"offsets": (), "sharpness": 1.0}
        set_later = {name: getattr(self, name) for name, usual in later.items() if getattr(self, name) != usual}
        plain = ("mode", "labels", "ids", "neighbours", "temperature", "layers", "source", "fixed")
        candidates = [[c.capability, c.description, c.example] for c in self.candidates]
        return {name: getattr(self, name) for name in plain} | {"candidates": candidates} | set_later

    @property
    def version(self) -> str:
        """Hash of the whole content; equal routers have equal versions."""
        arrays = [hashlib.sha256(a.tobytes()).hexdigest() for a in self._arrays().values()]
        return content_hash([self._fields(), arrays])

    def _arrays(self) -> dict[str, np.ndarray]:
        """The arrays that there are, by field."""
        found = {"vectors": self.vectors, "centre": self.centre} | ({"slopes": self.slopes} if self.offsets else {})
        return {name: np.ascontiguousarray(array) for name, array in found.items()}

    def save(self, folder: Path) -> str:
        """Write `router.json` and `router.safetensors` into `folder`; returns `version`."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self._arrays(), folder / VECTORS)
        (folder / FIELDS).write_text(
            json.dumps(self._fields() | {"version": self.version}, ensure_ascii=False), "utf-8"
        )
        flush(folder)
        return self.version

    @classmethod
    def load(cls, folder: Path) -> Router:
        """The router that `save` wrote. Raises `StoreError` if a file is missing or not the one written."""
        try:
            fields = json.loads((folder / FIELDS).read_text("utf-8"))
            arrays = load_file(folder / VECTORS)
            version = fields.pop("version")
            fields["candidates"] = tuple(Candidate(*values) for values in fields["candidates"])
            fields |= {name: tuple(fields[name]) for name in TUPLES if name in fields}
            router = cls(**(fields | arrays))
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as problem:
            raise StoreError(f"router in {folder} cannot be read ({problem}); fit and save it again") from problem
        if router.version != version:
            raise StoreError(
                f"router in {folder} has version {router.version}, {version} was saved; fit and save it again"
            )
        return router


def unit(rows: np.ndarray) -> np.ndarray:
    """Rows (n, d) scaled to length 1; a row of zeros stays."""
    lengths: np.ndarray = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(lengths > 0, lengths, 1.0), dtype=np.float32)


def nearest_columns(similarity: np.ndarray, count: int) -> np.ndarray:
    """Columns (n, count) of the largest similarities, largest first; the earlier column of equals."""
    return np.argsort(-similarity, axis=1, kind="stable")[:, :count]
