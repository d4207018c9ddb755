"""Which generation is installed, and the refusal when none of them is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pcpbench.errors import CannotMeasure
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode
from pcpbench.targets.vllm import api as api_module
from pcpbench.targets.vllm.api import RankView, VllmApi, VllmApi31, VllmApi32, generation_of

CPU = torch.device("cpu")


def manager(partition, staging, sharding=True):
    """A PCPManager of some generation, as far as the choice looks at it."""

    class Manager:
        if sharding:

            def __init__(self, shard_decode_requests): ...

        else:

            def __init__(self): ...

    Manager.partition_batch = partition
    if staging:
        setattr(Manager, staging, lambda self, batch: batch)
    return Manager


def new_partition(self, input_batch, batch_desc): ...


def old_partition(self, input_batch, padded_num_tokens=None): ...


@pytest.mark.parametrize(
    ("class_", "expected"),
    [
        (manager(new_partition, "prepare_inputs_for_capture_or_profile"), VllmApi),
        (manager(new_partition, "prepare_inputs_to_capture"), VllmApi32),
        (manager(new_partition, "prepare_inputs_to_capture", sharding=False), VllmApi31),
        (manager(old_partition, "prepare_inputs_to_capture"), "partition_batch(batch_desc)"),
        (manager(new_partition, None), "prepare_inputs_for_capture_or_profile"),
    ],
)
def test_the_generation_is_told_by_what_is_there(class_, expected):
    found = generation_of(class_)
    assert found is expected or (isinstance(found, str) and expected in found)


def test_the_installed_version_has_an_adapter(api):
    assert api.version.startswith(api.generation)


def test_a_moved_name_is_refused_with_version_and_name(api, monkeypatch):
    monkeypatch.delattr(api.modules["cp_utils"], "prepare_dcp_local_seq_lens")
    with pytest.raises(CannotMeasure) as told:
        api_module.vllm_api.__wrapped__()
    assert f"vllm {api.version} has no" in str(told.value)
    assert "cp_utils.prepare_dcp_local_seq_lens" in str(told.value)
    assert told.value.exit_code == 3


def test_a_moved_module_is_refused_with_version_and_name(api, monkeypatch):
    monkeypatch.setitem(api_module.MODULES, "cp_utils", "vllm.v1.worker.gpu.moved_away")
    with pytest.raises(CannotMeasure, match=r"has no vllm\.v1\.worker\.gpu\.moved_away"):
        api_module.vllm_api.__wrapped__()


def test_descriptors_go_there_and_back(api):
    ours = BatchExecutionDescriptor(CUDAGraphMode.FULL, 6, 2, uniform_token_count=3)
    theirs = api.descriptor(ours)
    assert theirs.cg_mode is api.CUDAGraphMode.FULL
    assert api.our_descriptor(theirs) == ours


def test_a_rank_sees_its_own_groups_inside_the_block_only(api):
    state = api.modules["parallel_state"]
    with api.groups(pcp=RankView(1, 2)):
        assert state.get_pcp_group().rank_in_group == 1
        assert state.get_pp_group().is_first_rank
    assert state._PCP is None


def test_a_rank_gathers_what_was_gathered_and_nothing_else():
    gathered = torch.arange(4)
    view = RankView(0, 2, gathered)
    assert view.all_gather(torch.zeros(2)) is gathered
    with pytest.raises(RuntimeError, match="nothing was gathered"):
        view.all_gather(torch.zeros(3))


def test_arguments_that_a_generation_lacks_are_left_out(api):
    def old(block_sizes): ...

    assert api._only(old, block_sizes=[1], sliding_window_reach=[2]) == {"block_sizes": [1]}


def test_batches_get_the_fields_that_there_are(api):
    named = dict.fromkeys((f.name for f in api_module.fields(api.InputBatch)), 0)
    batch = api.batch(**named, field_of_tomorrow=1)
    assert not hasattr(batch, "field_of_tomorrow")
    assert batch.num_reqs == 0


def test_names_are_looked_up_by_the_table(api):
    assert api.function("post_update") is api.modules["input_batch"].post_update
    with pytest.raises(KeyError):
        api.function("post_no_update")
    api_module.check_names(api, [(SimpleNamespace(a=1), "a")])
    with pytest.raises(CannotMeasure, match=r"SimpleNamespace\.b"):
        api_module.check_names(api, [(SimpleNamespace(a=1), "b")])
