import subprocess
import sys

import pytest

from pcpbench.config import PRESETS
from pcpbench.errors import UsageError
from pcpbench.kv_groups import ONE_GROUP, KVGroup
from pcpbench.model.presets import MODEL_SHAPES, model_shape


def test_every_configured_preset_has_a_shape():
    assert tuple(MODEL_SHAPES) == PRESETS


def test_v2_lite_layer_has_the_true_sizes():
    shape = model_shape("v2-lite-layer")
    assert (shape.latent_dim, shape.qk_head_dim, shape.num_attention_heads) == (576, 192, 16)
    assert (shape.hidden_size, shape.intermediate_size, shape.v_head_dim) == (2048, 10944, 128)
    assert shape.softmax_scale == pytest.approx(192**-0.5)


def test_layers_of_one_kind_share_a_kv_group():
    assert model_shape("tiny").kv_groups == ONE_GROUP
    assert model_shape("tiny").group_of(1) == KVGroup()
    shape = model_shape("tiny-swa")
    assert len(shape.layer_types) == shape.num_hidden_layers
    whole, sliding = shape.kv_groups
    assert (whole.layers, sliding.layers) == ((1,), (0, 2))
    assert (whole.sliding_window, sliding.sliding_window) == (0, 24)
    assert shape.layer_groups == (1, 0, 1)
    assert [shape.group_of(layer) for layer in range(3)] == [sliding, whole, sliding]
    assert (whole.span(16, 4), sliding.span(16, 4)) == (64, 16)
    assert [sliding.num_unseen(n) for n in (0, 23, 24, 40)] == [0, 0, 1, 17]


def test_unknown_preset_is_refused_with_the_names():
    with pytest.raises(UsageError, match="tiny, tiny-swa, small, v2-lite-layer"):
        model_shape("huge")


def test_shapes_need_no_torch_and_the_decoder_no_triton():
    code = (
        "import sys, pcpbench.model.presets; assert 'torch' not in sys.modules;"
        "import pcpbench.model.decoder; assert 'triton' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
