"""Promotion at the end of a run: what stands in MLflow's registry, and what a kill in between leaves."""

from everstep.host import mlflow_run

BEST = {"every_steps": 5, "best": {"metric": "bias", "mode": "max"}}


def registry(desk):
    return mlflow_run.connect(f"sqlite:///{desk.folder / 'mlflow.db'}")


def test_the_best_checkpoint_is_released(make_desk):
    desk = make_desk(release=True, checkpoint=BEST)
    ended = desk.run()
    assert ended.code == 0, ended.err
    assert ended.final["promotion"]["status"] == "production"
    aliases = registry(desk).get_registered_model("small").aliases
    assert {name: str(number) for name, number in aliases.items()} == dict.fromkeys(
        ("candidate", "production"), ended.final["promotion"]["version"]
    )
