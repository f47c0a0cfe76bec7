"""``resihp profile`` without running it: its file, its fits, its refusals."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron.resilience.cli.main import main
from megatron.resilience.profile.fit import fit, fit_layer, fit_link, mixes
from resihp_ext.cost.cost_model import from_profile
from resihp_ext.cost.layer_cost import Coefficients, Measured, MeasuredLayer, Part
from resihp_ext.cost.link import Link
from resihp_ext.cost.model_shape import MODELS, ModelShape
from resihp_ext.cost.profile_file import Profile
from resihp_ext.errors import UserError

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def same_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verb prepares the environment of its process for the device, here that of all tests."""
    for name in ("CUDA_VISIBLE_DEVICES", "TORCHDYNAMO_DISABLE", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
        if not os.environ[name]:
            monkeypatch.delenv(name)


@pytest.fixture
def one_core() -> Iterator[None]:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)


def profile() -> Profile:
    layers = {
        tp: MeasuredLayer(
            # Two ranks are less than twice as fast.
            forward=Coefficients(alpha_s=8e-6 / tp**0.5, beta_s=4e-9 / tp),
            backward=Coefficients(alpha_s=20e-6 / tp, beta_s=10e-9 / tp),
            head_forward_s=2e-6 / tp,
            head_backward_s=4e-6 / tp,
            embedding_s=1e-7,
        )
        for tp in (1, 2)
    }
    link = Link(latency_s=1e-4, bytes_per_s=1e9)
    return Profile(
        device="a CPU",
        shape=MODELS["tiny"],
        layers=layers,
        inside=link,
        between=link,
        step_parameter_s=1e-8,
        element_bytes=4,
        fixed_transition_s=1.0,
        notes={"mape_percent": 1.5},
    )


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(profile().to_json())
    model = from_profile(path)
    assert model.layers == Measured(shape=MODELS["tiny"], layers=profile().layers)
    assert (model.name, model.element_bytes, model.step_parameter_s) == ("a CPU", 4, 1e-8)


def test_what_was_measured_is_what_is_predicted(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(profile().to_json())
    model, shape = from_profile(path), MODELS["tiny"]
    forward = 8e-6 * 1024 + 4e-9 * 1024**2
    assert model.forward_s(shape, layers=1, tp=1) == pytest.approx(forward)
    two = 8e-6 / 2**0.5 * 1024 + 2e-9 * 1024**2
    assert model.forward_s(shape, layers=1, tp=2) == pytest.approx(two)
    backward = [model.part_s(shape, part, layers=1, tp=2) for part in (Part.INPUT, Part.WEIGHT)]
    assert sum(backward) == pytest.approx(10e-6 * 1024 + 5e-9 * 1024**2)
    head = model.forward_s(shape, layers=1, tp=1, last=True) - forward
    assert head == pytest.approx(2e-6 * 1024)


def test_other_shapes_and_degrees_are_scaled(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(profile().to_json())
    model, shape = from_profile(path), MODELS["tiny"]
    assert model.forward_s(shape, layers=1, tp=4) == pytest.approx(
        model.forward_s(shape, layers=1, tp=2) / 2
    )
    wide = ModelShape(
        name="wide",
        num_layers=4,
        hidden_size=256,
        ffn_hidden_size=512,
        attention_heads=8,
        query_groups=4,
        vocab_size=384,
        seq_length=1024,
    )
    linear = model.forward_s(wide, layers=1, tp=1, squared=0)
    assert linear == pytest.approx(4 * model.forward_s(shape, layers=1, tp=1, squared=0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda fields: fields.pop("inside"), "inside"),
        (lambda fields: fields.update(format="other"), "'other'"),
        (lambda fields: fields.update(layers=[]), "no TP degree"),
        (lambda fields: fields["model"].update(num_layers=0), "positive"),
        (lambda fields: fields["between"].update(bytes_per_s=0.0), "bandwidth"),
        (lambda fields: fields["layers"][0].update(embedding_s="slow"), "slow"),
    ],
)
def test_damaged_profiles_are_one_line(tmp_path: Path, change: object, words: str) -> None:
    fields = json.loads(profile().to_json())
    change(fields)  # type: ignore[operator]
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(fields))
    with pytest.raises(UserError, match=words) as error:
        from_profile(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_and_garbled_profiles(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        from_profile(tmp_path / "none.json")
    (tmp_path / "garbled.json").write_text("{")
    with pytest.raises(UserError, match=r"garbled\.json"):
        from_profile(tmp_path / "garbled.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(UserError, match=r"list\.json"):
        from_profile(tmp_path / "list.json")


def test_mixes_fill_their_micro_batches() -> None:
    assert mixes(1024)[0] == (1024,)
    assert {sum(mix) for mix in mixes(1024)} == {1024, 512}
    assert set(mixes(1024, quick=True)) < set(mixes(1024))
    assert len(set(mixes(1024))) == len(mixes(1024))


def test_a_fit_finds_what_the_times_were_made_from() -> None:
    batches = mixes(1024)
    seconds = [2e-3 + 7e-6 * sum(mix) + 5e-9 * sum(length**2 for length in mix) for mix in batches]
    found, mape_percent = fit_layer(batches, seconds)
    assert found.beta_s == pytest.approx(5e-9)
    # The constant part is a full micro-batch's.
    assert found.alpha_s == pytest.approx(7e-6 + 2e-3 / 1024)
    assert mape_percent == pytest.approx(0.0, abs=1e-6)


def test_a_fit_under_noise_says_how_wrong_it_is() -> None:
    random, batches = np.random.default_rng(1), mixes(1024) * 4
    seconds = [
        (7e-6 * sum(mix) + 5e-9 * sum(length**2 for length in mix)) * random.normal(1.0, 0.05)
        for mix in batches
    ]
    found, mape_percent = fit_layer(batches, seconds)
    assert found.beta_s == pytest.approx(5e-9, rel=0.1)
    assert 2.0 < mape_percent < 6.0


def test_coefficients_are_never_negative() -> None:
    """A line through (1, 3), (2, 2), (3, 1) would fall."""
    found = fit([[1.0, 1.0, 1.0], [1.0, 2.0, 3.0]], [3.0, 2.0, 1.0])
    assert found.values[1] == 0.0
    assert found.values[0] > 0.0


def test_links_are_a_latency_and_a_bandwidth() -> None:
    sizes = [1 << 10, 1 << 15, 1 << 20]
    link, mape_percent = fit_link(sizes, [1e-4 + size / 2e9 for size in sizes])
    assert link.latency_s == pytest.approx(1e-4)
    assert link.bytes_per_s == pytest.approx(2e9)
    assert mape_percent == pytest.approx(0.0, abs=1e-6)
    flat, _ = fit_link(sizes, [1e-4] * 3)
    assert flat.bytes_per_s == pytest.approx(sizes[-1] / 1e-4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--out"),
        (["--out", "{tmp}"], "is a directory"),
        (["--out", "{tmp}/none/p.json"], "cannot write into"),
        (["--out", "{tmp}/p.json", "--model", "gpt"], "--model gpt: choose one of llama2-7b"),
        (["--out", "{tmp}/p.json", "--tp", "3"], "8 attention heads do not divide by 3"),
        (["--out", "{tmp}/p.json", "--model", "llama2-70b", "--tp", "8000"], "do not divide"),
        (["--out", "{tmp}/p.json", "--seq-length", "100"], "multiple of 32"),
        (["--out", "{tmp}/p.json", "--seq-length", "-32"], "multiple of 32"),
        (["--out", "{tmp}/p.json", "--device", "tpu"], "tpu"),
        (["--out", "{tmp}/p.json", "--tp", "two"], "not a valid integer"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], words: str
) -> None:
    assert main(["profile", *(word.format(tmp=tmp_path) for word in arguments)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert words in said.err
    assert said.err.count("\n") == 1


def test_more_ranks_than_devices_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, one_core: None
) -> None:
    out = str(tmp_path / "p.json")
    assert main(["profile", "--device", "cpu", "--tp", "4", "--out", out]) == 2
    assert "--tp 4: this machine has 1 device(s)" in capsys.readouterr().err
