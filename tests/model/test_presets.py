import subprocess
import sys

import pytest

from pcpbench.config import PRESETS
from pcpbench.errors import UsageError
from pcpbench.model.presets import MODEL_SHAPES, model_shape


def test_every_configured_preset_has_a_shape():
    assert tuple(MODEL_SHAPES) == PRESETS


def test_v2_lite_layer_has_the_true_sizes():
    shape = model_shape("v2-lite-layer")
    assert (shape.latent_dim, shape.qk_head_dim, shape.num_attention_heads) == (576, 192, 16)
    assert (shape.hidden_size, shape.intermediate_size, shape.v_head_dim) == (2048, 10944, 128)
    assert shape.softmax_scale == pytest.approx(192**-0.5)


def test_unknown_preset_is_refused_with_the_names():
    with pytest.raises(UsageError, match="tiny, small, v2-lite-layer"):
        model_shape("huge")


def test_shapes_need_no_torch_and_the_decoder_no_triton():
    code = (
        "import sys, pcpbench.model.presets; assert 'torch' not in sys.modules;"
        "import pcpbench.model.decoder; assert 'triton' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
