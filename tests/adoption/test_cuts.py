"""Models of other people, by the shapes of their parameters: where their layers are."""

import dataclasses
import warnings

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cocodc_jax as cc


def zeros(*shape):
    return np.zeros(shape, np.float32)


def block(width=8):
    """A layer as Flax names it; inside it names end in numbers too."""
    return {
        "LayerNorm_0": {"scale": zeros(width)},
        "attn": {"qkv": {"kernel": zeros(3, width, width)}},
        "mlp": {
            "Dense_0": {"kernel": zeros(width, 2 * width)},
            "Dense_1": {"kernel": zeros(2 * width, width)},
        },
    }


def linen(num_layers, name="TransformerBlock_{}"):
    """A tree like NanoDO's and Gemma's: a dict of numbered subtrees."""
    layers = {name.format(i): block() for i in range(num_layers)}
    return {
        "params": {
            "embed": {"embedding": zeros(16, 8)},
            "final_norm": {"scale": zeros(8)},
            **layers,
        }
    }


def equinox(num_layers):
    """Lists of layers, of two stacks of unlike layers."""
    other = [{"mlp": zeros(8, 8), "norm": zeros(8)} for _ in range(num_layers)]
    return {
        "decoder": {"layers": [block() for _ in range(num_layers)]},
        "encoder": other,
    }


def scanned(num_layers):
    """One subtree with the layers in front, below other names."""
    one = {"attn": {"kernel": zeros(num_layers, 8, 8)}, "norm": zeros(num_layers, 8)}
    return {"model": {"embed": zeros(16, 8), "layers": one, "norm": zeros(8)}}


@pytest.mark.parametrize("name", ["layer_{}", "TransformerBlock_{}", "h{}", "{}"])
def test_named_layers_are_dealt_to_fragments_in_natural_order(name):
    params = linen(12, name)
    fragments = cc.cut(params, 4)
    held = [
        [i for i in range(12) if any(f"/{name.format(i)}/" in p.path for p in part)]
        for part in fragments.slices
    ]

    # After the embedding, as a model with `blocks` is cut.
    assert held == [[3, 7, 11], [0, 4, 8], [1, 5, 9], [2, 6, 10]]

    embed = [any("embed" in p.path for p in part) for part in fragments.slices]
    assert embed == [True, False, False, False]


def test_the_norm_of_gemma_is_not_a_fragment():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sizes = cc.cut(linen(4, "layer_{}"), 2).num_params
    assert max(sizes) < 2 * min(sizes)


def test_layers_in_lists_at_any_depth_are_cut():
    fragments = cc.cut(equinox(3), 3)
    for part in fragments.slices:
        paths = {p.path.rsplit("/mlp", 1)[0] for p in part if "mlp" in p.path}
        numbers = [path.split("/")[-1] for path in paths]
        assert len(paths) == 2
        assert len(set(numbers)) == 1


def test_a_pair_of_unlike_parts_is_no_stack():
    fragments = cc.cut((equinox(2)["decoder"], {"other": zeros(8)}), 2)
    assert all(len(part) > 1 for part in fragments.slices)


def test_a_scanned_stack_is_cut_by_rows():
    fragments = cc.cut(scanned(4), 2)
    rows = [{p.rows for p in part if "layers" in p.path} for part in fragments.slices]
    assert rows == [{(1, 3)}, {(0, 2)}]


def test_heads_of_an_attention_are_no_layers():
    params = {"attn": {"q": zeros(4, 8, 2), "o": zeros(4, 2, 8)}, "mlp": zeros(8, 8)}
    assert all(p.rows is None for part in cc.cut(params, 2).slices for p in part)


def test_blocks_names_a_stack_of_any_name():
    params = {"tower": {"w": zeros(4, 8, 8), "b": zeros(4, 8)}, "head": zeros(8)}
    parts = cc.cut(params, 2, blocks="tower").slices
    assert [{p.rows for p in part} for part in parts] == [{(0, 2), None}, {(1, 3)}]
    assert cc.cut(linen(4), 4, blocks="TransformerBlock").num_params


def test_blocks_that_name_no_parameter_are_refused():
    params = {"tower": {"w": zeros(4, 8, 8)}}
    with pytest.raises(ValueError, match="blocks='towers' is no part of any parameter"):
        cc.cut(params, 2, blocks="towers")


LAYER = {"w": zeros(4, 4)}


@pytest.mark.parametrize(
    "tree",
    [
        {"embed": zeros(8, 4), "blocks": {"0": LAYER, "1": LAYER}, "head": zeros(4)},
        {"embed": zeros(8, 4), "blocks": {"w": zeros(3, 4, 4)}, "norm": zeros(4)},
        {"a": LAYER, "b": LAYER, "c": LAYER},
    ],
)
def test_a_wrapped_tree_is_cut_as_the_tree_itself(tree):
    """Also with the names that this package's models have, and without any layers."""
    plain = cc.cut(tree, 2).slices
    wrapped = cc.cut({"params": tree}, 2).slices

    below = [[(f"params/{p.path}", p.rows) for p in parts] for parts in plain]
    assert [[(p.path, p.rows) for p in parts] for parts in wrapped] == below


def make(params, **options):
    method = cc.methods.get("streaming_diloco", sync_interval=4, num_fragments=2)
    loss_fn = lambda params, batch, key: (jnp.zeros(()), {})  # noqa: E731
    return cc.RegionProgram(loss_fn, optax.sgd(0.1), method, params, 2, **options)


def test_a_program_warns_of_fragments_of_unlike_size():
    params = {"embed": zeros(100, 8), "head": zeros(8)}
    with pytest.warns(UserWarning, match=r"fragments of 800, 8 parameters, .*cut\("):
        make(params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(params, fragments=cc.cut(params, 2))  # Asked for.
        make(linen(4))


def test_a_tree_that_cannot_be_cut_is_refused_with_a_repair():
    with pytest.raises(ValueError, match=r"fragments=cut\(params, .*blocks=NAME\)"):
        make({"w": zeros(8, 8)})


@pytest.mark.parametrize(
    ("cut_of", "message"),
    [
        # Two layers of four: the others would never be averaged.
        (
            {"blocks": {"w": zeros(2, 4)}, "b": zeros(4)},
            r"'blocks/w', .* rows \[0, 1\]",
        ),
        ({"blocks": {"w": zeros(6, 4)}, "b": zeros(4)}, r"of shape \(4, 4\), the rows"),
        (
            {"blocks": {"w": zeros(4, 4)}, "c": zeros(4)},
            "cut of .*'c'.* structure .*'b'",
        ),
    ],
)
def test_fragments_of_another_model_are_refused(cut_of, message):
    params = {"blocks": {"w": zeros(4, 4)}, "b": zeros(4)}
    with pytest.raises(ValueError, match=message):
        make(params, fragments=cc.cut(cut_of, 2))


@pytest.mark.parametrize("count", ["missing", "twice"])
def test_fragments_must_have_every_parameter_once(count):
    params = {"a": zeros(4, 4), "b": zeros(4)}
    both = cc.cut(params, 2)
    second = () if count == "missing" else sum(both.slices, ())
    fragments = dataclasses.replace(both, slices=(both.slices[0], second))

    with pytest.raises(ValueError, match="must be in exactly one fragment; use "):
        make(params, fragments=fragments)
