"""Resume is exact, the schedule is what it says, the best checkpoint is by MAT, bad losses stop the run."""

from __future__ import annotations

import pytest
import torch

from kvshot.drafters.checkpoint import load_drafter
from kvshot.drafters.init import new_drafter
from kvshot.errors import KvshotError
from kvshot.evaluation.metrics import summarise
from kvshot.evaluation.stepwise import stepwise_hits
from kvshot.products import SMALL
from kvshot.targets import OnlineFeatures
from kvshot.training.batches import WIDTH, load_batch, plan_epoch, training_batches
from kvshot.training.trainer import TrainConfig, Trainer, learning_rate, make_optimizers, scale_kv_gradient
from kvshot.training.ttt import TTTLoss, choose_columns

CONFIG = TrainConfig(steps=8, batch_tokens=512, columns_per_sequence=8, n_steps=3, eval_every=4, lr=3e-3,
                     precision="no")


def measure(small):
    def evaluate(drafter):
        return {"mat": summarise(stepwise_hits(drafter, small.store, 3, quiet=True), n_boot=2).mat.value}

    return evaluate


def trainer(small, folder, config=CONFIG, evaluate=None):
    drafter = new_drafter(small.target, small.config, small.vocab, seed=config.seed)
    return Trainer(small.target, drafter, small.vocab, small.store, config, folder, evaluate or measure(small))


@pytest.mark.parametrize("choice", [{}, {"precision": "bf16"}, {"optimizer": "muon"}], ids=str)
def test_two_halves_are_one_whole(small, tmp_path, choice):
    """N + N steps = 2 N steps, bit for bit: weights, optimizer, schedule, data order, columns."""
    config = CONFIG.model_copy(update=choice)
    whole = trainer(small, tmp_path / "whole", config)
    whole.run(quiet=True)
    first = trainer(small, tmp_path / "halves", config)
    first.run(until=4, quiet=True)
    second = trainer(small, tmp_path / "halves", config)
    second.done.wide = not first.done.wide  # what the run began with counts, not what this process finds faster
    done = second.run(quiet=True)
    assert done.step == 8 and [p["step"] for p in done.curve] == [4, 8]
    for name, tensor in whole.drafter.state_dict().items():
        assert torch.equal(tensor, second.drafter.state_dict()[name]), name
        assert not torch.equal(tensor, first.drafter.state_dict()[name]), name
    assert [p["loss"] for p in done.curve] == [p["loss"] for p in whole.done.curve]
    assert done.tokens == whole.done.tokens


def test_wide_products_reach_every_large_product_of_a_step(small, tmp_path, seen_products):
    config = CONFIG.model_copy(update={"precision": "bf16", "steps": 1, "eval_every": 1})
    for wide in (False, True):
        run = trainer(small, tmp_path / str(wide), config)
        run.done.wide = wide
        with seen_products() as seen:
            run.run(quiet=True)
        large = {dtype for rows, dtype in seen.products if rows >= SMALL}
        assert large == {torch.float32 if wide else torch.bfloat16}


def test_online_features_train_the_same_drafter(small, tmp_path):
    online = OnlineFeatures(small.target, small.examples, kv_layers=())
    runs = [Trainer(small.target, new_drafter(small.target, small.config, small.vocab, seed=0), small.vocab, features,
                    CONFIG, tmp_path / str(n), measure(small)).run(quiet=True)
            for n, features in enumerate((small.store, online))]
    for stored, live in zip(*(run.curve for run in runs), strict=True):
        assert stored["loss"] == pytest.approx(live["loss"], rel=1e-3) and stored["tokens"] == live["tokens"]


def test_training_learns(small, tmp_path):
    config = CONFIG.model_copy(update={"steps": 60, "eval_every": 30, "columns_per_sequence": None})
    run = trainer(small, tmp_path, config)
    before = measure(small)(run.drafter)["mat"]
    done = run.run(quiet=True)
    assert done.curve[-1]["loss"] < done.curve[0]["loss"] - 0.1
    assert done.best_mat > before + 0.05
    best, vocab = load_drafter(tmp_path / "best", small.target)
    assert measure(small)(best)["mat"] == done.best_mat
    assert torch.equal(vocab.ids, small.vocab.ids)


def test_the_best_checkpoint_is_chosen_by_mat_not_by_loss(small, tmp_path):
    answers = iter([{"mat": 2.0}, {"mat": 1.0}])
    run = trainer(small, tmp_path, evaluate=lambda drafter: next(answers))
    run.run(until=4, quiet=True)
    kept = {name: t.clone() for name, t in run.drafter.state_dict().items()}
    done = run.run(quiet=True)
    assert (done.best_step, done.best_mat) == (4, 2.0)
    best, _ = load_drafter(tmp_path / "best", small.target)
    assert all(torch.equal(kept[name], t) for name, t in best.state_dict().items())


def test_a_best_checkpoint_that_a_kill_left_aside_is_still_the_best(small, tmp_path):
    """Lost for good, the next check's is the best there is."""
    trainer(small, tmp_path, evaluate=lambda drafter: {"mat": 2.0}).run(until=4, quiet=True)
    (tmp_path / "best").rename(tmp_path / ".best.17.0a1b2c3d.old")
    again = trainer(small, tmp_path, evaluate=lambda drafter: {"mat": 1.0}).run(quiet=True)
    assert (again.best_step, again.best_mat) == (4, 2.0) and load_drafter(tmp_path / "best", small.target)
    assert not list(tmp_path.glob(".best*"))


def test_another_recipe_does_not_resume(small, tmp_path):
    trainer(small, tmp_path).run(until=4, quiet=True)
    with pytest.raises(KvshotError, match="another recipe"):
        trainer(small, tmp_path, CONFIG.model_copy(update={"lr": 1e-4})).run(quiet=True)


def test_a_resume_point_from_before_a_field_existed_is_continued(small, tmp_path):
    trainer(small, tmp_path).run(until=4, quiet=True)
    saved = torch.load(tmp_path / "last.pt", weights_only=True)
    for field in ("norm_before_residual", "rope_frequencies"):
        del saved["belongs"]["drafter"][field]
    torch.save(saved, tmp_path / "last.pt")
    assert trainer(small, tmp_path).run(quiet=True).step == 8
    saved["belongs"]["drafter"]["depth"] = 2
    torch.save(saved, tmp_path / "last.pt")
    with pytest.raises(KvshotError, match="its drafter differs"):
        trainer(small, tmp_path).run(quiet=True)


def test_a_resume_point_that_is_none_is_refused_in_one_line(small, tmp_path):
    trainer(small, tmp_path).run(until=4, quiet=True)
    path = tmp_path / "last.pt"
    whole, saved = path.read_bytes(), torch.load(path, weights_only=True)
    others = [3, None, [1, 2], "text", {}, {"belongs": 3}, {**saved, "belongs": {"drafter": [1]}},
              {**saved, "belongs": {**saved["belongs"], "drafter": {"depth": 0}}}, {**saved, "drafter": [1]},
              {**saved, "optimizers": []}, {**saved, "optimizers": [{}]}, {**saved, "progress": 3},
              {**saved, "progress": {**saved["progress"], "unknown": 1}}]
    for other in others:
        torch.save(other, path)
        with pytest.raises(KvshotError, match=r"last.pt is damaged \(\w+\): delete it to train") as caught:
            trainer(small, tmp_path).run(quiet=True)
        assert "\n" not in str(caught.value), other
    for damaged in (b"", b"no pickle", whole[:-100]):
        path.write_bytes(damaged)
        with pytest.raises(KvshotError, match="last.pt is damaged"):
            trainer(small, tmp_path).run(quiet=True)


def test_a_full_memory_is_no_damage(small, tmp_path, monkeypatch):
    trainer(small, tmp_path).run(until=4, quiet=True)
    monkeypatch.setattr(torch, "load", lambda *a, **k: torch.empty(10**15))
    with pytest.raises(RuntimeError, match="allocate memory"):
        trainer(small, tmp_path).run(quiet=True)


def test_a_loss_that_is_not_finite_stops_the_run_and_leaves_nothing(small, tmp_path):
    run = trainer(small, tmp_path)
    run.drafter.fc.weight.data[0, 0] = torch.nan
    with pytest.raises(KvshotError, match="loss is nan"):
        run.run(quiet=True)
    assert not list(tmp_path.iterdir())


def test_every_parameter_has_one_optimizer(small):
    drafter = new_drafter(small.target, small.config, small.vocab, seed=0)
    for choice, kinds in (("adamw", ["AdamW"]), ("muon", ["AdamW", "Muon"])):
        made = make_optimizers(drafter, CONFIG.model_copy(update={"optimizer": choice}))
        assert [type(o).__name__ for o in made] == kinds
        held = [id(p) for o in made for g in o.param_groups for p in g["params"]]
        assert sorted(held) == sorted(id(p) for p in drafter.parameters())
    ours = {id(p) for g in made[1].param_groups for p in g["params"]}
    assert id(drafter.lm_head.weight) not in ours and id(drafter.fc.weight) in ours


def test_learning_rate_schedule():
    config = CONFIG.model_copy(update={"steps": 100, "warmup": 0.1, "lr": 1.0, "final_lr": 0.2})
    rates = [learning_rate(config, s) for s in range(101)]
    assert rates[:10] == pytest.approx([(s + 1) / 10 for s in range(10)])
    assert rates[10] == pytest.approx(1.0) and rates[55] == pytest.approx(0.6) and rates[100] == pytest.approx(0.2)
    assert all(a >= b for a, b in zip(rates[10:], rates[11:], strict=False))


def test_the_kv_gradient_is_scaled_and_nothing_else(small):
    batch = load_batch(small.store, [0, 3], small.config)
    found = []
    for factor in (1.0, 50.0):
        drafter = new_drafter(small.target, small.config, small.vocab, seed=0)
        scale_kv_gradient(drafter, factor)
        loss = TTTLoss(drafter, small.target.scorer(small.vocab.ids), n_steps=3)
        loss(batch, choose_columns(batch.loss_mask, 3, None)).backward()
        found.append({name: p.grad for name, p in drafter.named_parameters()})
    for name, plain in found[0].items():
        factor = 50 if name.endswith(("k_proj.weight", "v_proj.weight")) else 1
        torch.testing.assert_close(found[1][name], plain * factor)


def test_a_layer_that_was_not_captured_is_missed_not_replaced(small):
    """The store has hidden layers 2, 3, 4 and no keys."""
    for change, message in (({"hidden_layers": (1, 3, 5)}, r"lack hidden layers \[1, 5\]: capture them first"),
                            ({"memory": "target", "kv_layers": (3, 5), "injection": "concat"},
                             r"lack kv layers \[3, 5\]: capture them first")):
        with pytest.raises(KvshotError, match=message):
            load_batch(small.store, [0], small.config.model_copy(update=change))
    fewer = load_batch(small.store, [0], small.config.model_copy(update={"hidden_layers": (4, 2)}))
    length = small.store.lengths[0]
    assert torch.equal(fewer.given.hidden[0, :, :length], small.store[0]["hidden"][[2, 0]])


def test_a_batch_is_padded_a_little_beyond_its_longest_sequence(small):
    store = small.store
    for indices in plan_epoch(store.lengths, 512, seed=0, epoch=0):
        longest = max(store.lengths[i] for i in indices)
        rows, width = load_batch(store, indices, small.config).ids.shape
        assert rows * longest <= 512 and width % WIDTH == 0 and longest <= width < longest + WIDTH


def test_batches_cover_each_epoch_once_within_the_budget():
    lengths = [5, 90, 33, 12, 60, 7, 41, 41, 88, 20]
    plans = [plan_epoch(lengths, 128, seed=3, epoch=e) for e in range(3)]
    for plan in plans:
        assert sorted(i for b in plan for i in b) == list(range(10))
        assert all(max(lengths[i] for i in b) * len(b) <= 128 for b in plan)
    assert plans[0] != plans[1] and plans[0] == plan_epoch(lengths, 128, seed=3, epoch=0)
    flat = [b for plan in plans for b in plan]
    for start in (0, 2, len(plans[0]), len(plans[0]) + 1):
        ahead = training_batches(lengths, 128, 3, start)
        assert [next(ahead) for _ in range(3)] == flat[start : start + 3]
