"""Classes of faults that really happened, with public reports, and the worlds to inject them in.

Owns class ids, titles and report numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from pcpbench.faults.fault import Fault, Setting, Site, planted
from pcpbench.model.presets import model_shape


class FaultClass(NamedTuple):
    """A class: what it is, and public issues or pull requests of engines that had it."""

    title: str
    reports: tuple[str, ...]


CLASSES: Final[dict[str, FaultClass]] = {
    "K01": FaultClass("lengths of padding rows not neutral",
                      ("sglang 1094", "sglang 1469", "vllm 38436")),
    "K02": FaultClass("slots past the real tokens not PAD",
                      ("vllm 21196", "vllm 36580", "vllm-ascend 5647")),
    "K03": FaultClass("stale block rows", ("vllm-ascend 12040", "vllm-ascend 16300", "vllm 49757")),
    "K05": FaultClass("null block holds garbage after capture", ("vllm 36939", "vllm 57156")),
    "K06": FaultClass("dummy or idle step touches live state",
                      ("vllm 39444", "vllm 56734", "vllm-ascend 15417")),
    "K07": FaultClass("padding rows unwritten, or reaching real rows",
                      ("vllm 37442", "vllm 37815", "vllm 57017")),
    "K09": FaultClass("padded count used as the real one, or the reverse",
                      ("vllm 34903", "vllm 36626", "vllm 23789")),
    "K10": FaultClass("metadata re-created each step",
                      ("vllm 36070", "vllm 33638", "vllm-ascend 8508")),
    "K11": FaultClass("a workspace moves after capture",
                      ("vllm 45487", "vllm 50386", "vllm 52553")),
    "K15": FaultClass("long-lived state replaced", ("vllm 48941", "vllm 55013")),
    "K16": FaultClass("host value or branch frozen at capture",
                      ("vllm 51119", "torchtitan 3893")),
    "K17": FaultClass("device-side plan not refreshed", ("TensorRT-LLM 18769", "sglang 37975")),
    "K18": FaultClass("phase decided by shape alone", ("vllm 49918", "vllm 53051", "vllm 26892")),
    "K20": FaultClass("capture size not a multiple of the decode query length",
                      ("vllm 46324", "vllm 53407", "vllm-ascend 3910")),
    "K21": FaultClass("ranks choose differently, or not as they should",
                      ("vllm 25906", "vllm 45610", "vllm-ascend 6011")),
    "K22": FaultClass("wrong local length or owner under DCP",
                      ("vllm 51031", "vllm 55212", "vllm 50391")),
    "K24": FaultClass("merge of partial attention by LSE",
                      ("vllm 47079", "vllm 38416", "sglang 33926")),
    "K25": FaultClass("collectives depend on one rank's data", ("vllm 53573",)),
    "K26": FaultClass("partition, restore or gather index wrong",
                      ("vllm-ascend 6344", "vllm-ascend 9479")),
    "K27": FaultClass("microbatches share or misread state", ("vllm 43145", "vllm 25625")),
    "K30": FaultClass("not a fault: another padded size picks another kernel", ("vllm 28131",)),
    "K31": FaultClass("results handed out in memory that a replay writes",
                      ("aiter 5393", "vllm-rbln 951")),
    "K32": FaultClass("a replay counts on what earlier work left in shared memory",
                      ("aiter 4494", "aiter 4715", "flashinfer 4553")),
    "K33": FaultClass("wrong on every arm alike, and at one with its own metadata",
                      ("vllm 37076", "vllm 39146", "onnxruntime-genai 2354", "tpu-inference 125")),
    "K34": FaultClass("rejected draft tokens: cursor, KV or acceptance wrong",
                      ("vllm-ascend 10032", "vllm-ascend 15529", "vllm 43434")),
    "K36": FaultClass("the scheduler's plan cannot be",
                      ("vllm 37164", "vllm 45357", "LMCache 2327")),
    "K37": FaultClass("a shape that should have a whole graph has none",
                      ("vllm-ascend 16049", "vllm 37865")),
    "K40": FaultClass("a KV group is given another one's blocks, shards or window",
                      ("vllm 42273", "vllm 30887", "sglang 25834")),
    "K41": FaultClass("a draft model's pass is given what is not its own",
                      ("sglang 18647", "sglang 22958", "sglang 26880", "vllm 50391",
                       "vllm 55055")),
}  # fmt: skip

PCP: Final = Setting()
TP: Final = Setting(pcp=1, tp=2)
DCP: Final = Setting(pcp=1, tp=4, dcp=4, interleave=2)
SPARSE: Final = Setting(pcp=2, dcp=2, model="tiny-sparse")


def shipped(
    class_id: str,
    name: str,
    description: str,
    plant: Callable[[Site], None],
    *contracts: str,
    setting: Setting = PCP,
    at_capture: bool = False,
    min_tp: int = 1,
    max_dcp: int | None = None,
) -> Fault:
    """A shipped fault; what its world must have follows from the setting's.

    One that is set in a PCP world patches the PCP path, one in a world without does the opposite.
    """
    return Fault(
        name=name,
        class_id=class_id,
        description=description,
        reports=CLASSES[class_id].reports,
        contracts=frozenset(contracts),
        inject=planted(plant),
        setting=setting,
        min_pcp=min(setting.pcp, 2),
        min_tp=min_tp,
        min_dcp=min(setting.dcp, 2),
        min_spec_tokens=min(setting.spec_tokens, 1),
        max_pcp=1 if setting.pcp == 1 else None,
        max_dcp=max_dcp,
        needs_microbatch=setting.microbatch,
        needs_dynamic_spec=setting.dynamic_spec != "off",
        needs_draft_model=setting.draft_model != "planned",
        needs_kv_groups=len(model_shape(setting.model).kv_groups) > 1,
        needs_sparse=model_shape(setting.model).is_sparse,
        needs_dcp_backend=None if setting.dcp_backend == "ag_rs" else setting.dcp_backend,
        needs_experts=bool(model_shape(setting.model).moe_layers),
        needs_backend=setting.all2all_backend if setting.expert_parallel else None,
        at_capture=at_capture,
    )
