"""Generation: the cache against full forward passes and transformers, the nucleus, checkpoints and exports. CPU."""

import shutil

import pytest
import torch
import torch.distributed as dist

from calls import said
from course_lib.checkpoint.checkpoints import save
from course_lib.checkpoint.hugging_face import to_hf
from course_lib.expert_parallel.mixture import apply_moe
from course_lib.five_d.layouts import Layout
from course_lib.five_d.meshes import build_mesh
from course_lib.five_d.model import full_weights, parallelize
from course_lib.single_gpu.model import ModelConfig, Transformer, causal_attention
from course_lib.train.generate import load_model, main
from course_lib.train.sampling import CachedAttention, generate_tokens, nucleus

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
MOE = {"experts": 4, "top_k": 2, "ffn_hidden": 40}
PROMPT = [5, 80, 3, 41, 200]
KINDS = {"dense": ({"tied": True}, None), "mixture": ({"tied": False}, MOE)}


def config_of(kind: str, **changed) -> ModelConfig:
    return ModelConfig(2, 32, 4, 2, 44, 256, **KINDS[kind][0], **changed)


def model_of(kind: str, **changed) -> Transformer:
    model = Transformer(config_of(kind, **changed))
    if KINDS[kind][1]:
        apply_moe(model, **KINDS[kind][1])
    return scaled(model)


@torch.no_grad()
def scaled(module):
    """A model with larger weights: after almost no training, the likeliest token would always be the same."""
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1 and "embed" not in name:
            parameter.mul_(16)
    return module


@torch.no_grad()
def without_cache(model: Transformer, tokens: list[int], count: int) -> list[int]:
    new: list[int] = []
    for _ in range(count):
        new.append(int(model(torch.tensor([tokens + new]))[0, -1].argmax()))
    return new


@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_changes_no_token_and_is_gone_afterwards(kind):
    """Dropout of a model in training is off meanwhile."""
    model = model_of(kind, dropout=0.5).eval()
    expected = without_cache(model, PROMPT, 24)
    assert len(set(expected)) > 5, "a text that says something about the cache"
    model.train()
    assert generate_tokens(model, PROMPT, 24, temperature=0) == expected
    assert model.training and all(block.attention.core is causal_attention for block in model.blocks)
    with pytest.raises(ValueError, match="not finite"):
        model.norm.weight.data.fill_(float("nan"))
        generate_tokens(model, PROMPT, 1)
    assert all(block.attention.core is causal_attention for block in model.blocks)


def test_a_token_costs_one_position_and_the_text_ends_at_its_end():
    model, shapes = model_of("dense"), []
    expected = without_cache(model, PROMPT, 10)
    model.embedding.register_forward_hook(lambda module, inputs, output: shapes.append(list(inputs[0].shape)))
    end = expected[6]
    found = generate_tokens(model, PROMPT, 10, temperature=0, end_token=end)
    assert found == expected[: expected.index(end) + 1]
    assert shapes == [[1, len(PROMPT)]] + [[1, 1]] * (len(found) - 1)
    assert generate_tokens(model, PROMPT, 0) == []


def test_the_cache_holds_what_it_must_and_no_more():
    cache = CachedAttention(6)
    q, k, v = torch.randn(1, 4, 4, 8), torch.randn(1, 4, 2, 8), torch.randn(1, 4, 2, 8)
    first = cache(q[:, :3], k[:, :3], v[:, :3])
    assert cache.keys.shape == (1, 6, 2, 8)
    both = torch.cat([first, cache(q[:, 3:], k[:, 3:], v[:, 3:])], dim=1)
    torch.testing.assert_close(both, causal_attention(q, k, v), rtol=1e-5, atol=1e-6)
    assert cache.keys.shape == (1, 6, 2, 8) and torch.equal(cache.keys[:, :4], k)


@pytest.mark.parametrize(
    "top_p, kept",
    [(0.4, [3]), (0.5, [3]), (0.51, [3, 1]), (0.75, [3, 1]), (0.76, [3, 1, 0]), (0.99, [3, 1, 0, 2]), (1.0, range(5))],
)
def test_the_nucleus_is_the_smallest_set_with_this_probability(top_p, kept):
    """In powers of 2, so that sums are exact."""
    probabilities = torch.tensor([0.125, 0.25, 0.0625, 0.5, 0.0625], dtype=torch.float64)
    kept = [*kept] if top_p != 0.99 else [0, 1, 2, 3, 4]
    found = nucleus(probabilities, top_p)
    assert found.nonzero().flatten().tolist() == sorted(kept)
    torch.testing.assert_close(found[kept], probabilities[kept] / probabilities[kept].sum())


def test_samples_follow_the_seed_the_temperature_and_top_p():
    model = model_of("dense")
    first, again, other = (generate_tokens(model, PROMPT, 20, 1.0, 0.9, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    greedy = generate_tokens(model, PROMPT, 20, 0, 1.0, seed=1)
    assert greedy == generate_tokens(model, PROMPT, 20, 0, 0.5, seed=2)
    assert greedy == generate_tokens(model, PROMPT, 20, 1e-9, 1.0) == generate_tokens(model, PROMPT, 20, 1.0, 1e-9)
    logits = model(torch.tensor([PROMPT]))[0, -1].detach().double()
    drawn = [generate_tokens(model, PROMPT, 1, 4.0, 0.6, seed=seed)[0] for seed in range(400)]
    expected = nucleus((logits / 4.0).softmax(0), 0.6)
    frequency = torch.bincount(torch.tensor(drawn), minlength=256) / 400
    assert expected[drawn].min() > 0 and (frequency - expected).abs().max() < 5 * 0.5 / 20


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ((PROMPT, 5, -0.1), "temperature is -0.1; it must be 0 or more"),
        ((PROMPT, 5, float("nan")), "temperature is nan"),
        ((PROMPT, 5, 1.0, 0.0), "top_p is 0.0; it must be above 0, and 1 at most"),
        ((PROMPT, 5, 1.0, 1.1), "top_p is 1.1"),
        ((PROMPT, -1), "-1 tokens to generate"),
        (([], 5), "there is no token to begin with"),
        (([5, 256], 5), "token 256 is not in the model's vocabulary of 256"),
    ],
)
def test_arguments_that_can_not_be_used_get_one_line(arguments, expected):
    found = said(lambda: generate_tokens(model_of("dense"), *arguments))
    assert found.startswith("ValueError: ") and expected in found and "\n" not in found


def saved(ways: list[tuple[str, str]], root) -> list[dict[str, torch.Tensor]]:
    """On a rank, of each (kind, layout): a checkpoint of a run, with the states of an optimizer; the weights."""
    full = []
    for kind, words in ways:
        layout = Layout.parse(words)
        parallel = parallelize(config_of(kind), layout, build_mesh(layout), moe=KINDS[kind][1], lr=1e-2)
        tokens = torch.randint(256, (4, 17), generator=torch.Generator().manual_seed(0))
        for _ in range(5):
            parallel.step(*(each.chunk(layout.dp)[parallel.mesh.dp.rank()] for each in (tokens[:, :-1], tokens[:, 1:])))
        if dist.get_rank() == 0:
            (root / kind).mkdir()
        dist.barrier()
        save(parallel, root / kind, 1, {"plan": {"tokenizer": None}})
        full.append({})
        if kind == "dense":
            full[-1] = full_weights(parallel)
    return full


@pytest.fixture(scope="module")
def folders(two, tmp_path_factory):
    """Folders of checkpoints of two layouts, by kind; of the dense model, the weights of both ranks' stages."""
    root = tmp_path_factory.mktemp("runs")
    weights = two(saved, [("dense", "pp2,zero1"), ("mixture", "dp2,ep2,zero1")], root)
    return {kind: root / kind for kind in KINDS}, weights[0][0] | weights[1][0]


def test_a_checkpoint_of_any_layout_becomes_one_model(folders):
    model, codec = load_model(folders[0]["dense"])
    assert model.head.weight is model.embedding.weight
    expected = folders[1]
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert codec.decode(codec.encode("né")) == "né" and codec.start == [] and codec.end is None
    single, _ = load_model(folders[0]["dense"] / "step-000000001")
    assert all(torch.equal(value, single.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_the_export_of_a_checkpoint_continues_as_transformers_does(folders, tmp_path, kind):
    from transformers import AutoModelForCausalLM

    to_hf(folders[0][kind] / "step-000000001", tmp_path / "export")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    models = [load_model(folders[0][kind])[0], load_model(tmp_path / "export")[0]]
    for model in (*models, theirs):
        scaled(model)
    options = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
    prompt = torch.tensor([PROMPT])
    expected = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0, len(PROMPT) :].tolist()
    assert len(set(expected)) > 5
    assert [generate_tokens(model, PROMPT, 20, temperature=0) for model in models] == [expected, expected]


def test_the_command_prints_a_continuation(folders, capsys):
    options = [str(folders[0]["mixture"]), "--prompt", "def f(x):", "--tokens", "7"]
    main([*options, "--seed", "3"])
    first = capsys.readouterr().out
    main([*options, "--seed", "3"])
    assert capsys.readouterr().out == first and first.startswith("def f(x):") and len(first) > len("def f(x):\n")


def test_a_model_s_own_tokenizer(folders, tmp_path, capsys):
    """Its start token comes before a prompt, its end token ends a text and begins an empty prompt's."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"</s>": 0, "[UNK]": 1} | {f"w{n}": n + 2 for n in range(254)}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    to_hf(folders[0]["dense"] / "step-000000001", tmp_path / "export")
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="[UNK]").save_pretrained(
        tmp_path / "export"
    )
    model, codec = load_model(tmp_path / "export")
    assert (codec.start, codec.end, codec.encode("w3 w1 ?")) == ([], 0, [5, 3, 1])
    expected = codec.decode([0, *generate_tokens(model, [0], 6, temperature=0, end_token=0)])
    main([str(tmp_path / "export"), "--tokens", "6", "--temperature", "0"])
    assert capsys.readouterr().out.endswith(f"{expected}\n")  # in a kernel, a progress bar is output too
    main([str(folders[0]["dense"]), "--tokenizer", str(tmp_path / "export"), "--tokens", "6", "--temperature", "0"])
    assert capsys.readouterr().out.endswith(f"{expected}\n")  # in a kernel, a progress bar is output too


def line_of(*argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*argv])
    assert isinstance(ended.value.code, str) and "\n" not in ended.value.code
    return ended.value.code


def test_what_can_not_be_continued_gets_one_line(folders, tmp_path):
    dense = str(folders[0]["dense"])
    assert line_of(str(tmp_path / "no")) == f"generate: there is no folder {tmp_path / 'no'}"
    assert "has no checkpoint (step-*) and no model in Hugging Face's format" in line_of(str(tmp_path))
    assert "the prompt is empty, and the tokenizer has no token" in line_of(dense)
    assert "temperature is -1.0" in line_of(dense, "--prompt", "a", "--temperature", "-1")
    assert "top_p is 2.0" in line_of(dense, "--prompt", "a", "--top-p", "2")
    assert "no.json: no such file or folder" in line_of(dense, "--prompt", "a", "--tokenizer", "no.json")
    for name in (".metadata", "__0_0.distcp", "checkpoint.json"):
        folder = shutil.copytree(folders[0]["dense"], tmp_path / name) / "step-000000001"
        (folder / name).write_bytes((folder / name).read_bytes()[:-9])
        assert "step-000000001" in (line := line_of(str(folder), "--prompt", "a")) and ("damaged" in line), line
    to_hf(folders[0]["dense"] / "step-000000001", tmp_path / "export")
    next((tmp_path / "export").glob("*.safetensors")).unlink()
    assert "lacks model-00001-of-00001.safetensors" in line_of(str(tmp_path / "export"), "--prompt", "a")
