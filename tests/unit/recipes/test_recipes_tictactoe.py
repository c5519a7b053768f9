"""The recipe tictactoe: its rules, its rows, whole games against a server, and its report."""

from __future__ import annotations

import json
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from recipes.tictactoe import agent, game
from tests.conftest import ROOT
from tests.recipe_scripts import composed, prepared, script, write_run
from tests.support.sample_records import sample_record

Move = Callable[[game.Board], str]


@contextmanager
def served(moves: dict[str, Move]) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """Serve two models that play; yield the address, and the role and the number of messages of each request."""
    asked: list[tuple[str, int]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            role = body["model"]
            asked.append((role, len(body["messages"])))
            text = moves[role](read_board(body["messages"][-1]["content"], role))
            message = {"role": "assistant", "content": text}
            answer = {
                "id": "x",
                "object": "chat.completion",
                "created": 0,
                "model": role,
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            }
            content = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def read_board(text: str, role: str) -> game.Board:
    """Read a board as a player is shown it, turned and mirrored."""
    side = 1 if role == "white" else -1
    signs = {"": 0, "X": side, "O": -side}
    words = text.split()
    assert [word[0] for word in words] == list(game.FIELDS)
    return tuple(signs[word[1:]] for word in words)


@cache
def value(board: game.Board) -> int:
    """Return how a game ends with best play, for the side that moves: 1 it wins, -1 it loses, 0 nobody does."""
    if game.winner(board):
        return -1  # the side that moved last has won
    return max((-value(game.after(board, field)) for field in game.free_fields(board)), default=0)


def best(board: game.Board) -> str:
    return game.FIELDS[max(game.free_fields(board), key=lambda field: -value(game.after(board, field)))]


def first(board: game.Board) -> str:
    return game.FIELDS[game.free_fields(board)[0]]


def played(moves: dict[str, Move], **info: Any) -> tuple[dict[str, float], list[tuple[str, int]]]:
    row = {
        "messages": [{"role": "system", "content": "s"}],
        "extra_info": {"opening": [], "program": "", "player": "random", "seed": 0} | info,
    }
    with served(moves) as (address, asked):
        return agent.run(row, address, "key")["roles"], asked


def test_the_rules() -> None:
    assert game.winner((1, 1, 1, -1, -1, 0, 0, 0, 0)) == 1
    assert game.winner((1, 0, 0, -1, -1, -1, 1, 0, 1)) == -1
    assert not game.is_over(game.EMPTY)
    assert [game.is_over(board) for board in ((1, 1, 1, -1, -1, 0, 0, 0, 0), (1, -1, 1, 1, -1, 1, -1, 1, -1))] == [
        True
    ] * 2
    board = game.board_of([4, 0])
    assert game.show(board) == "a b c\nd eX f\ng h iO"
    assert game.show(game.after(board, 1)) == "aX b c\ndO eO f\ng h i"
    assert [game.read_move(text, board) for text in ("b", " b\n", "i", "e", "j", "", "bc")] == [7, 7, *[None] * 5]


def images(board: game.Board) -> list[game.Board]:
    """Return a board, turned and mirrored in all eight ways, by turns of its rows alone."""
    found, rows = [], [board[row : row + 3] for row in range(0, 9, 3)]
    for _ in range(4):
        rows = list(zip(*rows[::-1], strict=True))
        found += [tuple(chain(*rows)), tuple(chain(*(row[::-1] for row in rows)))]
    return found


def test_boards_that_are_equal_up_to_turns_and_mirrors_are_read_as_one() -> None:
    open_boards, seen, waiting = set(), set(), [game.EMPTY]
    while waiting:
        board = waiting.pop()
        if board in open_boards or game.is_over(board):
            continue
        open_boards.add(board)
        waiting += [game.after(board, field) for field in game.free_fields(board)]
        text = game.show(board)
        seen.add(text)
        assert {game.show(image) for image in images(board)} == {text}
        assert read_board(text, game.role_of(game.side_to_move(board))) in images(board)
        for field in game.free_fields(board):
            assert game.read_move(game.name_of(field, board), board) == field
    assert (len(open_boards), len(seen)) == (4520, 627)


def test_the_finisher_completes_a_line_and_moves_at_random_otherwise() -> None:
    rng = random.Random(0)
    assert {game.finisher_move(game.board_of([0, 3, 1, 4]), rng) for _ in range(9)} == {2}
    assert {game.finisher_move(game.board_of([0, 3, 1, 4, 8]), rng) for _ in range(9)} == {5}
    assert {game.finisher_move(game.board_of([0, 3, 1]), rng) for _ in range(99)} == {2, 4, 5, 6, 7, 8}
    assert {game.random_move(game.board_of([0, 3, 1, 4]), rng) for _ in range(99)} == {2, 5, 6, 7, 8}


def test_best_play_loses_to_nobody() -> None:
    for seed in range(6):
        for side in game.ROLES:
            rewards, asked = played({side: best}, program=other(side), seed=seed)
            assert rewards[side] >= 0
            assert {role for role, _ in asked} == {side}


def other(role: str) -> str:
    return next(each for each in game.ROLES if each != role)


def test_both_sides_are_asked_each_in_its_own_conversation() -> None:
    rewards, asked = played({"white": best, "black": best})
    assert rewards == {"white": game.DRAW, "black": game.DRAW}
    assert asked == [(game.ROLES[number % 2], 2 + 2 * (number // 2)) for number in range(9)]


def test_a_game_goes_on_from_its_opening_and_the_winner_is_paid() -> None:
    rewards, asked = played({"white": first, "black": first}, opening=["0", "3", "1", "4"])
    assert (rewards, asked) == ({"white": 1.0, "black": -1.0}, [("white", 2)])


@pytest.mark.parametrize("said", ["i", "z", "", "b c"])
def test_a_side_that_names_no_free_field_loses(said: str) -> None:
    rewards, asked = played({"white": best, "black": lambda board: said}, opening=["0"])
    assert (rewards, len(asked)) == ({"black": -1.0, "white": 1.0}, 1)


def test_a_program_is_the_one_that_the_row_names() -> None:
    row = {"program": "black", "opening": ["0", "3", "1", "4", "8"]}
    assert played({"white": first}, **row, player="finisher")[0] == {"white": -1.0, "black": 1.0}
    at_random = [played({"white": first}, **row, player="random", seed=seed)[0]["white"] for seed in range(4)]
    assert max(at_random) > -1.0


def test_the_random_player_follows_its_seed() -> None:
    games = [played({"black": first}, program="white", seed=seed) for seed in (1, 1, 2, 3, 4)]
    assert games[0] == games[1]
    assert len({str(each) for each in games}) > 1


def test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    rows = prepared("tictactoe", tmp_path / "a", "--train-size", "30")
    assert len(rows["test"]) == 500
    evaluated = [row["extra_info"] for row in rows["test"]]
    assert [sum(info["program"] == role for info in evaluated) for role in game.ROLES] == [250, 250]
    assert all((list(info["opening"]), info["player"]) == ([], "random") for info in evaluated)
    assert len({info["seed"] for info in evaluated}) == 500
    trained = [row["extra_info"] for row in rows["train"]]
    assert {info["player"] for info in trained} == {"finisher"}
    assert [sum(info["program"] == role for info in trained) for role in ("", *game.ROLES)] == [10, 10, 10]
    assert not any(game.is_over(game.board_of([int(field) for field in info["opening"]])) for info in trained)
    assert all(game.ROLES[len(info["opening"]) % 2] != info["program"] for info in trained)
    for option, players in (("black", {"", "black"}), ("none", {""})):
        rows = prepared("tictactoe", tmp_path / option, "--train-size", "9", "--test-size", "2", "--program", option)
        assert {row["extra_info"]["program"] for row in rows["train"]} == players


def test_openings_are_not_over() -> None:
    rng = random.Random(0)
    for moves in range(9):
        assert len(game.draw_opening(moves, rng)) == moves


def test_the_report_counts_games_of_the_evaluation_as_each_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])

    def record(step: int, role: str, reward: float, validation: bool = True, valid: bool = True) -> dict[str, Any]:
        made = sample_record(request_id=uuid4().hex, step=step, validation=validation, valid=valid)
        for generation in made["generations"]:
            generation["role"] = role
        session = {"rewards": {role: reward, other(role): -reward}, "opponents": {other(role): "step 0"}}
        return {**made, "session": session}

    made = [record(0, "white", reward) for reward in (1, game.DRAW, -1, -1)] + [record(0, "black", game.DRAW)]
    made += [record(4, "white", reward) for reward in (1, 1, game.DRAW, -1)] + [
        record(4, "black", -1),
        record(4, "black", 1),
    ]
    made += [record(4, "black", -1, valid=False), record(3, "white", 1, validation=False)]
    write_run(tmp_path, made)
    found = script("tictactoe", "report").report(tmp_path)
    assert found["white_before"] == {"games": 4, "not_lost": 0.5, "won": 0.25}
    assert found["white_after"] == {"games": 4, "not_lost": 0.75, "won": 0.5}
    assert found["black_before"] == {"games": 1, "not_lost": 1.0, "won": 0.0}
    assert found["black_after"] == {"games": 2, "not_lost": 0.5, "won": 0.5}
    assert (found["opponents"], found["games"], found["invalid"]) == ({"black: step 0": 1}, 1, 1)


@pytest.mark.stack
def test_the_variants() -> None:
    def proxy(*variants: str) -> Any:
        return composed("tictactoe", *variants).actor_rollout_ref.rollout.custom.multiturn.proxy

    assert list(proxy().roles) == list(game.ROLES)
    assert list(proxy("one_side").train) == ["white"]
    listed = ["policy", 0, 10, 20]
    assert {role: list(each) for role, each in proxy("older_self").opponents.items()} == {
        "white": listed,
        "black": listed,
    }
    config = composed("tictactoe", "older_self")
    assert all(step % config.trainer.save_freq == 0 for step in proxy("older_self").opponents.black if step != "policy")
    assert config.actor_rollout_ref.rollout.custom.multiturn.turn_length == agent.MOST_TOKENS
