import logging
import re

import pytest

from tuning.logs import MainRankFilter, logger, set_up, warn_once


@pytest.fixture(autouse=True)
def _leave_logging_as_it_was():
    root = logging.getLogger("tuning")
    before = (list(root.handlers), root.level, root.propagate)
    yield
    root.handlers[:], root.propagate = before[0], before[2]
    root.setLevel(before[1])


def lines(capsys) -> list[str]:
    return [re.sub(r"^\S+ \S+ ", "", line) for line in capsys.readouterr().err.splitlines()]


def test_rank_0_writes_from_the_level_on(capsys):
    set_up(level="Info", rank=0)
    log = logger("tuning.room")
    log.debug("hidden")
    log.info("shown")
    assert lines(capsys) == ["INFO tuning.room: shown"]


def test_other_ranks_write_errors_and_what_is_marked(capsys):
    set_up(rank=1)
    log = logger("tuning.room")
    log.warning("hidden")
    log.warning("marked", extra={"all_ranks": True})
    log.error("shown")
    assert lines(capsys) == ["WARNING tuning.room: marked", "ERROR tuning.room: shown"]


def test_set_up_twice_writes_once(capsys):
    set_up()
    set_up(level="debug")
    logger("tuning").debug("one")
    assert lines(capsys) == ["DEBUG tuning: one"]


def test_foreign_loggers_stay_as_they_are(capsys):
    before = list(logging.getLogger().handlers)
    set_up()
    assert logging.getLogger().handlers == before
    logger("tuning.room").info("mine")
    assert len(lines(capsys)) == 1


def test_filter_by_rank():
    record = logging.LogRecord("tuning", logging.INFO, "", 0, "x", (), None)
    assert MainRankFilter(0).filter(record)
    assert not MainRankFilter(3).filter(record)


def test_warn_once(caplog):
    log = logging.getLogger("other")
    seen: set[str] = set()
    for _ in range(2):
        warn_once(log, "careful", seen)
    warn_once(log, "careful", set())
    assert [record.message for record in caplog.records] == ["careful", "careful"]
