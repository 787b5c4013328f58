"""Runs conformance cases: a graph with native Anima, the same with ours, and mixtures; outputs compared bit for bit.

A case file is JSON:

    {
      "base": "text_to_image",                     the graph of bases.json it changes
      "matrix": {"ks.sampler_name": ["euler", ...]},   optional: expands into one case per combination; "all" means
                                                   every value the host offers
      "nodes": {"id": {...}},                      nodes added or replaced
      "set": {"ks.model": ["x", 0]},               inputs changed
                                                   a capture named "expected" must equal ours in every case
      "expect": "equal"                            or {"bound": 1e-5, "why": "..."}: within a bound;
                                                   or {"native_is_wrong": "..."}: ours differs from native
                                                   ("within": how far ours may be from "expected");
                                                   or {"fails": "TypeError", "why": "..."}: the host cannot do this,
                                                   with native and ours alike ("older_hosts_ignore_it": there
                                                   native runs as if the node were absent)
    }

Prompts are written with the placeholder class PROMPT, loaders with MODEL, CLIP and VAE. Widget inputs left out get the
node's defaults. A node that the host lacks makes the case "absent", which is reported, never silently skipped.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from host import Graph, GraphError, Host, fused_host
from torch import Tensor

FOLDER = Path(__file__).parent
OLDER_HOST_BOUND = 2e-2
"""Relative, for hosts that do not fuse the gated residual: rounding that grows over the steps of a sampler."""
CASES = FOLDER / "cases"
VARIANTS: dict[str, dict[str, str]] = {
    "native": {"MODEL": "TestNativeLoader", "CLIP": "TestNativeClipLoader", "VAE": "VAELoader", "PROMPT": "CLIPTextEncode"},
    "ours": {"MODEL": "AnimaUNetLoader", "CLIP": "AnimaTextEncoderLoader", "VAE": "AnimaVAELoader", "PROMPT": "Qwen3AdapterTextEncode"},
    "our conditioning, native model": {"MODEL": "TestNativeLoader", "CLIP": "AnimaTextEncoderLoader", "VAE": "AnimaVAELoader",
                                       "PROMPT": "Qwen3AdapterTextEncode"},
    "native conditioning, our model": {"MODEL": "AnimaUNetLoader", "CLIP": "TestNativeClipLoader", "VAE": "VAELoader",
                                       "PROMPT": "CLIPTextEncode"},
}  # fmt: skip
"""The placeholder's class in each variant."""


VERDICTS = ("equal", "bound", "right", "fails", "absent", "wrong")


@dataclass
class Case:
    """One graph to run, and what is expected of it."""

    name: str
    graph: Graph
    expect: Any = "equal"
    variants: tuple[str, ...] = tuple(VARIANTS)


@dataclass
class Result:
    """`verdict` is equal, bound, right (native is not), fails (with native too), absent or wrong."""

    case: str
    verdict: str
    detail: str = ""
    nodes: list[str] = field(default_factory=list)


def load_cases(host: Host) -> list[Case]:
    """Every case of every file, matrices expanded with what the host offers."""
    bases = json.loads((FOLDER / "bases.json").read_text())
    cases: list[Case] = []
    for path in sorted(CASES.glob("*.json")):
        spec = json.loads(path.read_text())
        for suffix, changes in _expand(host, bases[spec.get("base", "text_to_image")], spec.get("matrix", {})):
            graph = copy.deepcopy(bases[spec.get("base", "text_to_image")])
            graph |= copy.deepcopy(spec.get("nodes", {}))
            for target, value in {**spec.get("set", {}), **changes}.items():
                node, _, name = target.partition(".")
                graph[node]["inputs"][name] = value
            name = path.stem + (f" [{suffix}]" if suffix else "")
            cases.append(Case(name, graph, spec.get("expect", "equal"), tuple(spec.get("variants", VARIANTS))))
    return cases


def _expand(host: Host, base: Graph, matrix: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    values = [_options(host, base, target) if choice == "all" else choice for target, choice in matrix.items()]
    for combination in itertools.product(*values):
        yield ", ".join(map(str, combination)), dict(zip(matrix, combination, strict=True))


def _options(host: Host, base: Graph, target: str) -> list[Any]:
    node, _, name = target.partition(".")
    spec = host.nodes.NODE_CLASS_MAPPINGS[base[node]["class_type"]].INPUT_TYPES()["required"][name]
    return list(spec[0])


def build(host: Host, case: Case, variant: str) -> Graph:
    """The case's graph for a variant, defaults filled in."""
    classes = VARIANTS[variant]
    graph = copy.deepcopy(case.graph)
    for node in graph.values():
        node["class_type"] = classes.get(node["class_type"], node["class_type"])
        cls = host.nodes.NODE_CLASS_MAPPINGS.get(node["class_type"])
        if cls is None:
            raise LookupError(node["class_type"])
        for name, spec in cls.INPUT_TYPES().get("required", {}).items():
            if name not in node["inputs"]:
                default = _default(spec)
                if default is not None:
                    node["inputs"][name] = default
    return graph


def _default(spec: Any) -> Any:
    options = spec[1] if len(spec) > 1 else {}
    if "default" in options:
        return options["default"]
    choices = spec[0] if isinstance(spec[0], (list, tuple)) else options.get("options")
    return choices[0] if choices else None


def run_case(host: Host, case: Case) -> Result:
    """Run all variants of a case and judge them."""
    nodes = sorted({node["class_type"] for node in case.graph.values()})
    if "fails" in case.expect:
        return _expect_failure(host, case, nodes)
    outputs: dict[str, dict[str, Any]] = {}
    try:
        for variant in case.variants:
            outputs[variant] = host.run(build(host, case, variant))
    except LookupError as error:
        return Result(case.name, "absent", f"the host has no node {error}", nodes)
    except GraphError as error:
        return Result(case.name, "wrong", f"{variant}: {error}"[:300], nodes)
    return _judge(case, outputs, nodes)


def _expect_failure(host: Host, case: Case, nodes: list[str]) -> Result:
    """Every variant must fail with the named kind of error."""
    for variant in case.variants:
        try:
            host.run(build(host, case, variant))
        except LookupError as error:
            return Result(case.name, "absent", f"the host has no node {error}", nodes)
        except GraphError as error:
            if error.kind == case.expect["fails"]:
                continue
            return Result(case.name, "wrong", f"{variant}: {error}"[:300], nodes)
        ignored = (
            case.expect.get("older_hosts_ignore_it")
            and not fused_host()
            and VARIANTS[variant]["MODEL"] == "TestNativeLoader"
        )
        if not ignored:
            return Result(case.name, "wrong", f"{variant} does not fail any more", nodes)
    return Result(case.name, "fails", case.expect["why"], nodes)


def _judge(case: Case, outputs: dict[str, dict[str, Any]], nodes: list[str]) -> Result:
    native, ours = outputs["native"], outputs["ours"]
    wanted = difference({"x": ours["latent"]}, {"x": ours["expected"]}) if "expected" in ours else 0
    within = case.expect.get("within", 0) if isinstance(case.expect, dict) else 0
    if wanted > within:
        return Result(case.name, "wrong", f"ours is off its definition by {wanted:.3g}", nodes)
    differences = {v: difference(out, native) for v, out in outputs.items() if v != "native"}
    if case.expect == "equal":
        allowed = 0 if fused_host() else OLDER_HOST_BOUND * magnitude(native)
        unequal = {variant: d for variant, d in differences.items() if d > allowed}
        if unequal:
            return Result(
                case.name, "wrong", ", ".join(f"{v}: max difference {d:.3g}" for v, d in unequal.items()), nodes
            )
        worst = max(differences.values())
        if worst:
            return Result(case.name, "bound", f"{worst:.2g}: this host rounds the gated residual otherwise", nodes)
        return Result(case.name, "equal", "", nodes)
    if "bound" in case.expect:
        worst = max(differences.values())
        verdict = "bound" if worst <= case.expect["bound"] else "wrong"
        return Result(
            case.name, verdict, f"{worst:.2g} of at most {case.expect['bound']:g}: {case.expect['why']}", nodes
        )
    if differences["ours"] == 0:
        return Result(case.name, "wrong", "native gives our result now: upstream fixed it, make the case equal", nodes)
    detail = case.expect["native_is_wrong"] + (f"; ours is within {within:g} of its definition" if within else "")
    return Result(case.name, "right", detail, nodes)


def difference(a: Any, b: Any) -> float:
    """Largest absolute difference of two captured values; infinity when they do not compare."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = {
            k
            for k in a.keys() | b.keys()
            if k in ("samples", "latent", "image", "x", "expected") or k not in a or k not in b
        }
        return max((difference(a.get(k), b.get(k)) for k in keys if k != "expected"), default=float("inf"))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or not (torch.isfinite(a).all() and torch.isfinite(b).all()):
            return float("inf")
        return (a.float() - b.float()).abs().max().item()
    return float("inf")


def magnitude(out: dict[str, Any]) -> float:
    """Largest absolute value of what was captured."""
    tensors = [v["samples"] if isinstance(v, dict) else v for v in out.values()]
    return max(float(t.abs().max()) for t in tensors if isinstance(t, Tensor))


def table(results: list[Result]) -> str:
    """Markdown of all results, with a heading and a summary."""
    import comfyui_version

    counts = {v: sum(r.verdict == v for r in results) for v in VERDICTS}
    lines = [
        "# Built-in nodes on Anima: native and ours", "",
        f"Each case is a graph run in ComfyUI {comfyui_version.__version__} on the same weights: all native, all ours, our "
        "conditioning into the native model, native conditioning into ours. *equal* means equal bits in all of them. Made by "
        "`python tools/run.py conformance` from the cases in `tests/comfy/conformance/cases`. The official Anima templates "
        "run on our loaders too (`tests/browser/test_official_templates.py`); saved models, previews and attention overrides "
        "are compared in `tests/comfy/test_interoperability.py`, start flags in `tests/comfy/test_start_flags.py`.", "",
        f"{len(results)} cases: {counts['equal']} equal, {counts['bound']} equal within a bound, {counts['right']} right where "
        f"native is not, {counts['fails']} that ComfyUI cannot do with native either, {counts['absent']} absent in this host, {counts['wrong']} wrong.",
        "", "| case | verdict | remark |", "| --- | --- | --- |",
    ]  # fmt: skip
    names = {"right": "right, native is not", "bound": "within a bound", "fails": "fails, as with native"}
    return (
        "\n".join([*lines, *(f"| {r.case} | {names.get(r.verdict, r.verdict)} | {r.detail} |" for r in results)]) + "\n"
    )
