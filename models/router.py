"""Which adapter a task gets: once per task, from its first observation.

`retrieval` looks the first observation up among successful training episodes: embeddings of the base's own hidden states,
mean-centred, cosine similarity, the k nearest vote with weights. Episodes that the base solves alone are a class of their
own (""), so the router knows when no adapter should be used. `label` lets the base read one label token per candidate,
divided by the probabilities that it gives on an empty request (contextual calibration); a small base reads labels by
chance, so it earns its place on validation (`choose_mode`). `both` multiplies the two.
"""

from __future__ import annotations

import json
import string
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from environments.contract import content_hash
from errors import ConfigurationError

NONE = ""
TEMPERATURES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
Vectors = npt.NDArray[np.float32]
Labels = Callable[[Sequence[str]], Mapping[str, float]]


@dataclass(frozen=True)
class RouteDecision:
    """`capability` "" is the base model. `probabilities` are over the allowed capabilities and ""; `neighbours` are the
    ids of the nearest training episodes."""

    capability: str
    probabilities: Mapping[str, float]
    neighbours: tuple[str, ...]
    milliseconds: float
    mode: str = "retrieval"

    def smallest_set(self, p: float) -> dict[str, float]:
        """The fewest choices with cumulative probability > p, renormalised; only "" when that is the most probable."""
        if self.capability == NONE:
            return {NONE: 1.0}
        chosen, total = dict[str, float](), 0.0
        for name, value in sorted(self.probabilities.items(), key=lambda item: -item[1]):
            if name == NONE:
                continue
            chosen[name] = value
            total += value
            if total > p:
                break
        return {name: value / total for name, value in chosen.items()}


@dataclass(frozen=True)
class Router:
    """A fitted router. `vectors` (n, d) are centred and normalised; `labels` and `ids` say what each row is."""

    vectors: Vectors
    mean: Vectors
    labels: tuple[str, ...]
    ids: tuple[str, ...]
    temperature: float
    k: int = 5

    @classmethod
    def fit(cls, vectors: Vectors, labels: Sequence[str], ids: Sequence[str], k: int = 5) -> Router:
        """Centre, normalise, and choose the temperature by leave-one-out likelihood."""
        if not len(vectors) == len(labels) == len(ids) or not len(labels):
            raise ConfigurationError(f"router: {len(vectors)} vectors, {len(labels)} labels, {len(ids)} ids; give one of each, at least one row")
        mean = vectors.mean(axis=0)
        router = cls(_unit(vectors - mean), mean.astype(np.float32), tuple(labels), tuple(ids), 0.05, min(k, len(labels)))
        if len(labels) < 3:
            return router
        similarity = router.vectors @ router.vectors.T
        np.fill_diagonal(similarity, -np.inf)
        scores = {t: router._likelihood(similarity, t) for t in TEMPERATURES}
        return replace(router, temperature=max(scores, key=lambda t: scores[t]))

    def _likelihood(self, similarity: npt.NDArray[np.float32], temperature: float) -> float:
        names = sorted(set(self.labels))
        total = 0.0
        for i, label in enumerate(self.labels):
            total += float(np.log(self._votes(similarity[i], temperature, names)[0].get(label, 0.0) + 1e-3))
        return total

    def _votes(self, similarity: npt.NDArray[np.float32], temperature: float, names: Sequence[str]) -> tuple[dict[str, float], list[int]]:
        """Weights by label of the k nearest rows whose label is in `names`."""
        order = [int(i) for i in np.argsort(-similarity, kind="stable") if self.labels[int(i)] in names][: self.k]
        raw = np.exp((similarity[order] - similarity[order].max()) / temperature)
        weights = dict.fromkeys(names, 0.0)
        for i, w in zip(order, raw / raw.sum(), strict=True):
            weights[self.labels[i]] += float(w)
        return weights, order

    @property
    def version(self) -> str:
        """Hash of everything that decides a route."""
        return content_hash([self.vectors.tobytes().hex(), list(self.labels), list(self.ids), self.temperature, self.k])

    def decide(
        self, vector: Vectors, allowed: Sequence[str], mode: str = "retrieval", read_labels: Labels | None = None
    ) -> RouteDecision:
        """Route one first observation among `allowed` capabilities and ""."""
        began = time.perf_counter()
        if mode == "off" or not allowed:
            return RouteDecision(NONE, {NONE: 1.0}, (), 1000 * (time.perf_counter() - began), "off")
        names = [*[a for a in allowed if a in self.labels], NONE]
        # Rows of capabilities that are not served count for none: the base answers such tasks.
        similarity = self.vectors @ _unit((vector - self.mean)[None])[0]
        served = replace(self, labels=tuple(label if label in names else NONE for label in self.labels))
        votes, order = served._votes(similarity, self.temperature, names)
        if mode in ("label", "both"):
            if read_labels is None:
                raise ConfigurationError(f"router mode {mode!r} needs a reader of label tokens; use mode 'retrieval'")
            read = read_labels(names)
            votes = {n: read[n] * (votes[n] + 1e-6 if mode == "both" else 1.0) for n in names}
            total = sum(votes.values())
            votes = {n: v / total for n, v in votes.items()}
        best = max(names, key=lambda n: votes[n])
        return RouteDecision(best, votes, tuple(self.ids[i] for i in order), 1000 * (time.perf_counter() - began), mode)

    def save(self, folder: Path) -> None:
        """Write `router.safetensors` and `router.json`."""
        from safetensors.numpy import save_file

        folder.mkdir(parents=True, exist_ok=True)
        save_file({"vectors": self.vectors, "mean": self.mean}, folder / "router.safetensors")
        rest = {"labels": self.labels, "ids": self.ids, "temperature": self.temperature, "k": self.k}
        (folder / "router.json").write_text(json.dumps(rest))

    @classmethod
    def load(cls, folder: Path) -> Router:
        """Read what `save` wrote."""
        from safetensors.numpy import load_file

        try:
            rest = json.loads((folder / "router.json").read_text())
            arrays = load_file(folder / "router.safetensors")
        except (OSError, ValueError) as problem:
            raise ConfigurationError(f"router in {folder.name} cannot be read: {problem}; fit it again") from problem
        return cls(arrays["vectors"], arrays["mean"], tuple(rest["labels"]), tuple(rest["ids"]), rest["temperature"], rest["k"])


def _unit(rows: Vectors) -> Vectors:
    norms = np.linalg.norm(rows, axis=-1, keepdims=True)
    return (rows / np.maximum(norms, 1e-12)).astype(np.float32)


def label_reader(
    next_logprobs: Callable[[str], Mapping[str, float]], request: str, descriptions: Mapping[str, str]
) -> Labels:
    """Reads one label token per candidate with the base. `next_logprobs(prompt)` gives log-probabilities of "A", "B", ...

    The probabilities on an empty request are divided out, so that a label's own popularity does not decide.
    """

    def read(names: Sequence[str]) -> dict[str, float]:
        letters = string.ascii_uppercase[: len(names)]
        lines = "\n".join(f"{letter}: {descriptions.get(n, n) if n else 'none of these'}" for letter, n in zip(letters, names, strict=True))

        def probabilities(text: str) -> npt.NDArray[np.float64]:
            found = next_logprobs(f"{lines}\nRequest: {text}\nLabel:")
            values = np.array([found[letter] for letter in letters])
            weights: npt.NDArray[np.float64] = np.exp(values - values.max())
            return weights / weights.sum()

        calibrated = probabilities(request) / probabilities("")
        calibrated /= calibrated.sum()
        return dict(zip(names, calibrated.tolist(), strict=True))

    return read


def accuracy(decisions: Sequence[RouteDecision], truth: Sequence[str]) -> float:
    """Share of decisions that chose the true capability ("" where none is right)."""
    return float(np.mean([d.capability == t for d, t in zip(decisions, truth, strict=True)])) if truth else 0.0


def confusion(decisions: Sequence[RouteDecision], truth: Sequence[str]) -> tuple[list[str], list[list[int]]]:
    """Labels and counts[true][chosen]."""
    labels = sorted({*truth, *(d.capability for d in decisions)}, key=lambda n: (n == NONE, n))
    counts = [[sum(t == a and d.capability == b for d, t in zip(decisions, truth, strict=True)) for b in labels] for a in labels]
    return labels, counts


def choose_mode(right: Mapping[str, Sequence[bool]], margin: float = 0.02) -> str:
    """The mode to use from validation: retrieval, unless another is right more often by more than `margin`."""
    rates = {mode: float(np.mean(values)) for mode, values in right.items() if len(values)}
    best = max(rates, key=lambda m: rates[m])
    return best if best != "retrieval" and rates[best] > rates.get("retrieval", 0.0) + margin else "retrieval"
