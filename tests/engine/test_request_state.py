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


@pytest.fixture
def verifying():
    """Slots: a decodes behind 5 tokens, b behind 3; both have three drafts. c ends a prefill."""
    state = RequestState(3, 12, 16, 3, 1000, CPU)
    state.add_request("a", 5, [10, 11, 12, 13, 14], 5, 9)
    state.add_request("b", 3, [20, 21, 22], 3, 9)
    state.add_request("c", 4, [30, 31, 32, 33], 2, 9)
    state.apply_staged_writes()
    a, b, c = (state.req_id_to_index[r] for r in "abc")
    state.all_token_ids[a, 5], state.all_token_ids[b, 3] = 15, 23
    state.total_len[[a, b]] = torch.tensor([6, 4], dtype=torch.int32)
    return state, a, b, c


def verify(state, slots, scheduled, computed, num_logits, targets):
    return state.post_verify(
        np.array(slots, dtype=np.int32),
        np.array(scheduled, dtype=np.int32),
        np.array(computed),
        np.array(num_logits),
        torch.tensor(targets),
    )


def test_cursors_advance_by_what_was_accepted(verifying):
    state, a, b, c = verifying
    state.set_drafts(np.array([b, a]), np.array([[50, 51, 52], [60, 61, 62]]))
    assert state.draft_tokens[[a, b]].tolist() == [[60, 61, 62], [50, 51, 52]]
    # b: 50 is right, 51 is not (77 is), 52 would be again. a: all right. c: its last two tokens.
    accepted = verify(
        state, [b, a, c], [4, 4, 2], [3, 5, 2], [4, 4, 1],
        [50, 77, 52, 99, 60, 61, 62, 63, 88],
    )  # fmt: skip
    assert accepted.tolist() == [1, 3, 0]
    assert state.num_computed_tokens[[a, b, c]].tolist() == [9, 5, 4]
    # The host takes every draft for accepted.
    assert state.num_computed_tokens_np[[a, b, c]].tolist() == [9, 7, 4]
    assert state.total_len[[a, b, c]].tolist() == [10, 6, 5]
    assert state.known_tokens("b") == [20, 21, 22, 23, 50, 77]
    assert state.known_tokens("a") == [10, 11, 12, 13, 14, 15, 60, 61, 62, 63]
    assert state.known_tokens("c") == [30, 31, 32, 33, 88]
    assert state.last_sampled_tokens[[a, b, c], 0].tolist() == [63, 77, 88]


def test_the_host_learns_of_a_rejection_a_step_later(verifying):
    state, _, b, _ = verifying
    state.set_drafts(np.array([b]), np.array([[50, 51, 52]]))
    verify(state, [b], [4], [3], [4], [49, 0, 0, 0])
    assert (state.num_computed_tokens[b], state.num_computed_tokens_np[b]) == (4, 7)
    verify(state, [b], [4], [4], [4], [50, 51, 52, 1])
    assert (state.num_computed_tokens[b], state.num_computed_tokens_np[b]) == (8, 8)


def test_fewer_drafts_than_others_and_a_row_that_samples_nothing(verifying):
    state, a, b, c = verifying
    state.set_drafts(np.array([a, b]), np.array([[60, 0, 0], [50, 51, 52]]))
    # c is in the middle of its prompt. a has one draft; what stands behind it is no draft.
    accepted = verify(state, [a, b, c], [2, 4, 1], [5, 3, 2], [2, 4, 0], [60, 0, 50, 51, 9, 9])
    assert accepted.tolist() == [1, 2]
    assert state.num_computed_tokens[[a, b, c]].tolist() == [7, 6, 3]
    assert state.last_sampled_tokens[[a, b, c], 0].tolist() == [0, 9, 0]
    assert state.known_tokens("a")[-2:] == [60, 0]
    assert state.known_tokens("c") == [30, 31, 32, 33]


def test_targets_of_rejected_drafts_at_the_longest_length_stay_out_of_the_row_below():
    state = RequestState(2, 6, 16, 3, 1000, CPU)
    state.add_request("a", 5, [1, 2, 3, 4, 5], 4, 9)
    state.add_request("b", 1, [9], 0, 9)
    state.apply_staged_writes()
    a = state.req_id_to_index["a"]
    verify(state, [a], [4], [4], [4], [7, 8, 8, 8])
    assert state.known_tokens("a") == [1, 2, 3, 4, 5, 7]
    assert state.known_tokens("b") == [9]
