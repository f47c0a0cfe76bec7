"""Which checkpoint is chosen for every state that a checkpoint directory can be in."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megatron.resilience.checkpoint.choose import Choice, choose_checkpoint, iteration_directory
from megatron.resilience.checkpoint.config import CheckpointSafetyConfig
from megatron.resilience.checkpoint.damage import Damage
from megatron.resilience.checkpoint.settle import settle
from megatron.resilience.checkpoint.tracker import TRACKER_FILE, read_tracker, write_tracker
from megatron.resilience.checkpoint.verify import verify_checkpoint
from resihp_ext.errors import UserError

pytestmark = pytest.mark.unit


def make(root: Path, *iterations: int, tracker: str | None = None, finished: bool = True) -> Path:
    for iteration in iterations:
        directory = iteration_directory(root, iteration)
        directory.mkdir(parents=True)
        if finished:
            (directory / ".metadata").write_bytes(b"x")
            (directory / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    if tracker is not None:
        root.mkdir(exist_ok=True)
        (root / TRACKER_FILE).write_text(tracker)
    return root


def verifier(*bad: int) -> Callable[[Path], Sequence[Damage]]:
    """Real check of the marker files, plus damage in the named iterations."""

    def verify(directory: Path) -> Sequence[Damage]:
        if directory.name in {f"iter_{iteration:07d}" for iteration in bad}:
            damage = Damage(
                kind="content",
                directory=str(directory),
                file="__1_0.distcp",
                tensor="model.w[0]",
                problem="does not match its checksum",
            )
            return (damage, damage)
        return verify_checkpoint(directory, level="off").damages

    return verify


def choose(root: Path, *bad: int, save: Path | None = None, step: int | None = None) -> Choice:
    return choose_checkpoint(root, save or root, verify=verifier(*bad), ckpt_step=step)


def test_newest_is_chosen_without_a_word_when_all_is_well(tmp_path):
    root = make(tmp_path / "c", 10, 20, tracker="20\n")
    choice = choose(root)
    assert choice == Choice(directory=str(root / "iter_0000020"), iteration=20)
    assert settle(choice, root, root) == ()
    assert read_tracker(root).iteration == 20


def test_damaged_newest_falls_back_and_names_the_file(tmp_path):
    root = make(tmp_path / "c", 10, 20, 30, tracker="30")
    choice = choose(root, 30, 20)
    assert choice.iteration == 10
    assert [Path(path).name for path in choice.skipped] == ["iter_0000030", "iter_0000020"]
    lines = "\n".join(choice.notices)
    assert f"{root}/iter_0000030/__1_0.distcp: model.w[0] does not match its checksum" in lines
    assert "iter_0000020/__1_0.distcp" in lines
    assert "older" in choice.notices[-1]


def test_settling_renames_damaged_directories_and_corrects_the_tracker(tmp_path):
    root = make(tmp_path / "c", 10, 20, tracker="20")
    lines = settle(choose(root, 20), root, root)
    assert len(lines) == 2
    assert (root / "iter_0000020.set-aside-1" / ".metadata").exists()
    assert not (root / "iter_0000020").exists()
    assert read_tracker(root).iteration == 10
    again = choose(root)
    assert (again.iteration, again.notices, settle(again, root, root)) == (10, (), ())


def test_settling_leaves_a_foreign_load_directory_alone(tmp_path):
    root = make(tmp_path / "c", 10, 20, tracker="20")
    assert settle(choose(root, 20, save=tmp_path / "s"), root, tmp_path / "s") == ()
    assert (root / "iter_0000020").exists()
    assert read_tracker(root).iteration == 20


@pytest.mark.parametrize("content", ["", "garbage", "-3", "12 13", "\x00\x00"])
def test_garbled_tracker_is_reported_and_replaced(tmp_path, content):
    root = make(tmp_path / "c", 10, 20, tracker=content)
    choice = choose(root, save=tmp_path / "elsewhere")
    assert choice.iteration == 20
    assert f"{TRACKER_FILE} is garbled" in choice.notices[0]
    assert len(settle(choice, root, tmp_path / "elsewhere")) == 1
    assert read_tracker(root).iteration == 20


def test_missing_tracker_is_reported_and_the_newest_is_used(tmp_path):
    choice = choose(make(tmp_path / "c", 10, 20))
    assert choice.iteration == 20
    assert f"{TRACKER_FILE} is missing" in choice.notices[0]


def test_tracker_that_names_a_missing_directory(tmp_path):
    root = make(tmp_path / "c", 10, tracker="20")
    choice = choose(root)
    assert choice.iteration == 10
    assert "iter_0000020 does not exist" in choice.notices[0]


def test_newer_than_the_tracker_is_ignored(tmp_path):
    root = make(tmp_path / "c", 10, tracker="10")
    make(root, 20, finished=False)
    make(root, 30)
    choice = choose(root)
    assert choice.iteration == 10
    assert sum("newer than" in line for line in choice.notices) == 2
    settle(choice, root, root)
    # 30 holds .metadata and could be mixed with the next save at that step; 20 could not.
    assert (root / "iter_0000020").exists()
    assert not (root / "iter_0000030").exists()


def test_unfinished_directory_is_skipped_when_the_tracker_is_lost(tmp_path):
    root = make(tmp_path / "c", 10)
    make(root, 20, finished=False)
    choice = choose(root)
    assert choice.iteration == 10
    assert "iter_0000020/.metadata is missing" in "\n".join(choice.notices)


@pytest.mark.parametrize("tracker", ["20", None, "garbage"])
def test_nothing_sound_is_an_error_that_names_the_newest_file(tmp_path, tracker):
    root = make(tmp_path / "c", 10, 20, tracker=tracker)
    with pytest.raises(
        UserError, match=r"no sound checkpoint.*iter_0000020/__1_0\.distcp"
    ) as error:
        choose(root, 10, 20)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("tracker", ["20", "garbage", "release"])
def test_a_tracker_alone_is_a_trace(tmp_path, tracker):
    root = make(tmp_path / "c", tracker=tracker)
    with pytest.raises(UserError):
        choose(root)


def test_first_launch_with_load_equal_to_save_starts_fresh_and_says_so(tmp_path):
    for root in (tmp_path / "absent", tmp_path):
        choice = choose(root)
        assert choice.directory is None
        assert "training starts from iteration 0" in choice.notices[0]
        assert settle(choice, root, root) == ()


def test_same_directory_is_recognised_through_links(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    choice = choose_checkpoint(tmp_path / "link", tmp_path / "real", verify=verifier())
    assert choice.directory is None


def test_first_save_that_was_never_finished_does_not_block_a_relaunch(tmp_path):
    root = make(tmp_path / "c", 10, finished=False)
    choice = choose(root)
    assert choice.directory is None
    assert "iter_0000010 is a save that was never finished" in choice.notices[1]
    with pytest.raises(UserError):
        choose(root, save=tmp_path / "elsewhere")


@pytest.mark.parametrize("exists", [True, False])
def test_wrong_load_path_never_starts_from_random_weights(tmp_path, exists):
    root = tmp_path / "typo"
    if exists:
        root.mkdir()
    with pytest.raises(UserError, match=r"--load: .*typo"):
        choose(root, save=tmp_path / "save")
    with pytest.raises(UserError):
        choose_checkpoint(root, None, verify=verifier())


def test_ckpt_step_means_exactly_that_iteration(tmp_path):
    root = make(tmp_path / "c", 10, 20, 30, tracker="20")
    assert choose(root, step=10).iteration == 10
    assert settle(choose(root, step=10), root, root) == ()
    assert choose(root, step=30).iteration == 30
    with pytest.raises(UserError, match=r"--ckpt-step 20: .*__1_0.distcp.*1 more"):
        choose(root, 20, step=20)
    with pytest.raises(UserError, match="iter_0000040 does not exist"):
        choose(root, step=40)
    with pytest.raises(UserError, match="ignores"):
        choose(root, step=0)


def test_release_checkpoints(tmp_path):
    root = make(tmp_path / "c", 10, tracker="release")
    with pytest.raises(UserError, match="release does not exist"):
        choose(root)
    (root / "release").mkdir()
    (root / "release" / ".metadata").write_bytes(b"x")
    (root / "release" / "metadata.json").write_bytes(b"{}")
    choice = choose(root)
    assert (choice.directory, choice.iteration) == (str(root / "release"), None)
    assert settle(choice, root, root) == ()
    with pytest.raises(UserError, match="'release'"):
        choose(root, step=10)


def test_remote_directories_are_refused(tmp_path):
    with pytest.raises(UserError, match="msc://"):
        choose_checkpoint("msc://bucket/run", None, verify=verifier())


def test_choice_survives_json(tmp_path):
    choice = choose(make(tmp_path / "c", 10, 20, tracker="20"), 20)
    assert Choice.from_json(choice.to_json()) == choice


def test_tracker_that_cannot_be_rewritten_says_what_to_write(tmp_path, monkeypatch):
    root = make(tmp_path / "c", 10, tracker="garbage")
    choice = choose(root)
    # A directory in the place of the temporary file fails for every user, root included.
    monkeypatch.setattr("os.getpid", lambda: 1)
    (root / f"{TRACKER_FILE}.1.tmp").mkdir()
    with pytest.raises((UserError, OSError)) as error:
        settle(choice, root, root)
    assert isinstance(error.value, UserError)
    assert "write 10 into it" in str(error.value)


def test_tracker_is_written_whole(tmp_path):
    write_tracker(tmp_path, 123)
    assert (tmp_path / TRACKER_FILE).read_text() == "123"
    assert [path.name for path in tmp_path.iterdir()] == [TRACKER_FILE]


@pytest.mark.parametrize(
    "fields",
    [
        {"verify_checkpoint": "most"},
        {"verify_checkpoint_timeout_s": 0},
        {"verify_checkpoint_timeout_s": float("nan")},
        {"verify_checkpoint_timeout_s": float("inf")},
    ],
)
def test_config_refuses_what_it_does_not_know(fields):
    with pytest.raises(UserError, match="--resilience-verify-checkpoint"):
        CheckpointSafetyConfig(**fields)


def test_config_defaults_to_a_full_check():
    assert CheckpointSafetyConfig().verify_checkpoint == "full"
