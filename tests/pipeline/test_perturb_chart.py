"""The chart of a bundle: the same numbers, the same bytes, and every number's label."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from defenses.panacea.layers import LayerCoefficients
from workers.pipeline.plots import MOST_LABELS, layer_chart, layer_figure

SHARES = LayerCoefficients(
    {0: 0.5, 1: 0.3, 2: 0.2}, {"v_proj": 0.25, "q_proj": 0.75}, {"A": 0.1, "B": 0.9}
)
AVERAGE = {0: 0.4, 1: 0.4, 2: 0.2}


def texts(svg: str) -> list[str]:
    return ["".join(node.itertext()) for node in ElementTree.fromstring(svg).iter()]


def test_the_same_numbers_give_the_same_bytes_in_another_process() -> None:
    program = (
        "from tests.pipeline.test_perturb_chart import *\n"
        "print(layer_chart(SHARES, AVERAGE, 'title'), end='')"
    )
    root = Path(__file__).parents[2]
    other = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True
    )
    assert layer_chart(SHARES, AVERAGE, "title") == other.stdout


def test_the_chart_carries_no_date() -> None:
    assert "date" not in layer_chart(SHARES, AVERAGE, "title").lower()


def test_modules_factors_and_layers_are_labelled() -> None:
    found = texts(layer_chart(SHARES, None, "a title"))
    for text in ("q_proj", "v_proj", "75%", "25%", "A", "B", "90%", "0", "1", "2", "a title"):
        assert text in found


def test_the_average_is_marked_only_where_there_is_one() -> None:
    label = "mean of the last tenth of the steps"
    assert label in texts(layer_chart(SHARES, AVERAGE, "title"))
    assert label not in texts(layer_chart(SHARES, None, "title"))


def test_a_deep_model_gets_no_more_labels_than_fit() -> None:
    deep = SHARES._replace(by_layer={-1: 0.2} | dict.fromkeys(range(80), 0.01))
    axes = layer_figure(deep, None, "title").axes[0]
    labels = [tick.get_text() for tick in axes.get_xticklabels()]
    assert labels[:3] == ["none", "0", "6"]
    assert len(labels) <= MOST_LABELS + 1


def test_a_perturbation_of_zero_can_be_drawn() -> None:
    nothing = LayerCoefficients({0: 0.0}, {"q_proj": 0.0}, {"A": 0.0})
    assert layer_chart(nothing, None, "title").startswith("<?xml")


def test_matplotlib_is_loaded_only_to_draw() -> None:
    program = "import sys, workers.pipeline.plots; print('matplotlib' in sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
