"""The table before training: nothing that was dropped is missing from it."""

from tuning.data.origin import Origin
from tuning.data.report import Counts, Dropped, Report

TRAIN = Counts(
    read=1_200,
    kept=1_194,
    truncated=3,
    dropped={"empty answer": Dropped(count=5, rows=(1, 4, 9)), "no trainable token": Dropped(count=1, rows=(7,))},
    tokens=300_000,
    supervised=60_000,
)
EVAL = Counts(read=10, kept=10, tokens=1_000, supervised=250, padding=4)


def test_the_whole_table():
    report = Report(
        kind="texts in text; trained on: all",
        counts={"train": TRAIN, "eval": EVAL},
        origins={name: Origin(files=((f"{name}.jsonl", 1_200),), fingerprint="") for name in ("train", "eval")},
        max_seq_length=4_096,
        notes=("columns not used: id",),
        seconds=1.24,
    )
    assert str(report) == (
        "rows are texts in text; trained on: all\n"
        "                                train   eval\n"
        "rows read                       1,200     10\n"
        "dropped: empty answer               5      0\n"
        "dropped: no trainable token         1      0\n"
        "rows kept                       1,194     10\n"
        "of these cut to 4,096 tokens        3      0\n"
        "tokens                        300,000  1,000\n"
        "supervised tokens              60,000    250\n"
        "supervised share                20.0%  25.0%\n"
        "padding left out                    0      4\n"
        "train: 5 rows dropped, empty answer: row 1 of train.jsonl, row 4 of train.jsonl, row 9 of train.jsonl, ...\n"
        "train: 1 row dropped, no trainable token: row 7 of train.jsonl\n"
        "columns not used: id\n"
        "prepared in 1.2 s"
    )


def test_counts_of_batches_add_up():
    other = Counts(
        read=3,
        kept=1,
        dropped={"empty answer": Dropped(count=1, rows=(20,)), "empty text": Dropped(count=1, rows=(21,))},
        padding=2,
        tokens=5,
        supervised=1,
    )
    both = Counts() + TRAIN + other
    assert both == Counts(
        read=1_203,
        kept=1_195,
        truncated=3,
        dropped={
            "empty answer": Dropped(count=6, rows=(1, 4, 9)),
            "no trainable token": Dropped(count=1, rows=(7,)),
            "empty text": Dropped(count=1, rows=(21,)),
        },
        padding=2,
        tokens=300_005,
        supervised=60_001,
    )


def test_counts_survive_as_json():
    assert Counts.from_json(TRAIN.to_json()) == TRAIN
    assert Counts.from_json(Counts().to_json().encode()) == Counts()


def test_few_rows_are_named():
    assert Dropped.of([3, 5, 8, 9]) == Dropped(count=4, rows=(3, 5, 8))
    assert Dropped.of([3]) + Dropped.of([5, 8, 9]) == Dropped(count=4, rows=(3, 5, 8))
