"""Slots of requests and what the device knows of them."""

import numpy as np
import pytest
import torch

from pcpbench.engine.request_state import RequestState

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield


@pytest.fixture
def requests():
    state = RequestState(3, 8, 16, 0, 1000, CPU)
    state.add_request("a", 2, [10, 11], 0, 5)
    state.add_request("b", 1, [20, 21, 22], 2, 5)
    return state


def test_state_arrives_when_applied(requests):
    assert not requests.all_token_ids.any()
    requests.apply_staged_writes()
    a, b = (requests.req_id_to_index[r] for r in "ab")
    assert requests.all_token_ids[a].tolist() == [10, 11, 0, 0, 0, 0, 0, 0]
    assert requests.known_tokens("b") == [20, 21, 22]
    # b was preempted: what it had generated counts as known, not as prompt.
    assert requests.prompt_len[[a, b]].tolist() == [2, 1]
    assert requests.prefill_len[[a, b]].tolist() == [2, 3]
    assert requests.total_len[[a, b]].tolist() == [2, 3]
    assert requests.num_computed_tokens[[a, b]].tolist() == [0, 2]
    assert requests.num_computed_tokens_np[[a, b]].tolist() == [0, 2]
    assert requests.index_to_req_id == {a: "a", b: "b"}
    assert requests.num_reqs == 2


def test_slot_freed_last_is_taken_first(requests):
    index = requests.remove_request("a")
    assert requests.remove_request("a") is None
    requests.add_request("c", 1, [30], 0, 5)
    assert requests.req_id_to_index["c"] == index
    requests.apply_staged_writes()
    # What the tenant before left is behind the new tokens, where nothing reads.
    assert requests.known_tokens("c") == [30]


def test_tenant_that_left_before_its_state_was_sent_writes_nothing(requests):
    index = requests.remove_request("a")
    requests.apply_staged_writes()
    assert not requests.all_token_ids[index].any()


def test_new_tenant_has_no_sampled_token_of_the_last_one(requests):
    requests.apply_staged_writes()
    requests.last_sampled_tokens.fill_(77)
    index = requests.remove_request("a")
    requests.add_request("c", 1, [30], 0, 5)
    requests.apply_staged_writes()
    assert requests.last_sampled_tokens[index].tolist() == [0]
    assert requests.last_sampled_tokens[requests.req_id_to_index["b"]].tolist() == [77]


def test_post_update_advances_cursors_and_appends_what_was_sampled(requests):
    requests.apply_staged_writes()
    a, b = (requests.req_id_to_index[r] for r in "ab")
    slots, tokens = np.array([b, a], dtype=np.int32), np.array([1, 1], dtype=np.int32)
    requests.post_update(slots, tokens, np.array([True, False]), torch.tensor([99]))
    assert requests.num_computed_tokens[[a, b]].tolist() == [1, 3]
    assert requests.num_computed_tokens_np[[a, b]].tolist() == [1, 3]
    assert requests.known_tokens("b") == [20, 21, 22, 99]
    assert requests.known_tokens("a") == [10, 11]
    assert requests.last_sampled_tokens[b].tolist() == [99]
    assert requests.total_len[[a, b]].tolist() == [2, 4]
    assert requests.prefill_len[[a, b]].tolist() == [2, 3]
    none = np.array([False, False])
    requests.post_update(slots, tokens, none, torch.zeros(0, dtype=torch.int64))
    assert requests.num_computed_tokens[[a, b]].tolist() == [2, 4]
    assert requests.known_tokens("b") == [20, 21, 22, 99]


def test_request_cannot_grow_past_the_longest_length():
    state = RequestState(1, 3, 16, 0, 1000, CPU)
    state.add_request("a", 2, [10, 11], 1, 5)
    state.apply_staged_writes()
    args = (np.array([0]), np.array([1]), np.array([True]))
    state.post_update(*args, torch.tensor([12]))
    assert state.known_tokens("a") == [10, 11, 12]
    with pytest.raises(ValueError, match="3 tokens"):
        state.post_update(*args, torch.tensor([13]))


@pytest.mark.parametrize(
    ("req_id", "prompt_len", "tokens", "message"),
    [
        ("a", 1, [1], "has a slot already"),
        ("c", 2, [1], "prompt of 2 among 1 tokens"),
        ("c", 1, [1] * 9, "at most 8 fit"),
    ],
)
def test_impossible_requests_are_refused(requests, req_id, prompt_len, tokens, message):
    with pytest.raises(ValueError, match=message):
        requests.add_request(req_id, prompt_len, tokens, 0, 5)


def test_no_free_slot_is_refused(requests):
    requests.add_request("c", 1, [1], 0, 5)
    with pytest.raises(ValueError, match="all 3 slots are taken"):
        requests.add_request("d", 1, [1], 0, 5)
