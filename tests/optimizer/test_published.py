"""The catalogue of published shapes: names, and sizes that add up to what is published."""

import pytest

from optimizer.architectures import PUBLISHED, architecture
from optimizer.stack import Component

EVERY = sorted(PUBLISHED)


@pytest.mark.parametrize("name", EVERY)
def test_parameters_are_those_of_the_models_page_to_the_last_one(name: str) -> None:
    assert PUBLISHED[name].shape.parameters == PUBLISHED[name].parameters


def test_published_sizes_are_those_that_people_know() -> None:
    billions = {n: round(p.parameters / 1e9, 3) for n, p in PUBLISHED.items()}
    assert billions["qwen2-7b"] == 7.616
    assert billions["llama-3-8b"] == 8.030
    assert billions["mixtral-8x7b"] == 46.703
    assert len(billions) >= 15


def test_qwen2_7b_by_hand() -> None:
    # Per layer: q and o 3584², k and v 512·3584 each, three of 18944·3584, biases of
    # q, k and v 3584 + 2·512, two norms. Then table, head and the last norm.
    layer = 2 * 3584**2 + 2 * 512 * 3584 + 3 * 18944 * 3584 + 4608 + 2 * 3584
    assert 28 * layer + 2 * 152064 * 3584 + 3584 == 7_615_616_512


@pytest.mark.parametrize(
    "name",
    ["qwen2-7b", "Qwen2-7B", "Qwen/Qwen2-7B", "QWEN/qwen2_7b-instruct", " qwen2 7b "],
)
def test_a_model_goes_by_its_id_or_a_repository_however_it_is_written(
    name: str,
) -> None:
    found = architecture(name)
    assert found is not None
    assert found.id == "qwen2-7b"


@pytest.mark.parametrize("name", ["", "qwen2", "qwen2-7b-x", "/", "Qwen/"])
def test_other_names_are_no_models(name: str) -> None:
    assert architecture(name) is None


@pytest.mark.parametrize("name", EVERY)
def test_every_repository_leads_back(name: str) -> None:
    for repository in PUBLISHED[name].repositories:
        assert architecture(repository) is PUBLISHED[name]
        assert "/" not in name
    assert PUBLISHED[name].source.startswith("https://")


def test_every_sixth_layer_of_gemma_3_sees_all_and_every_second_of_gemma_2() -> None:
    def windows(name: str) -> list[int | None]:
        sites = PUBLISHED[name].shape.sites
        return [s.window for s in sites if s.site.component is Component.KV_CACHE]

    assert windows("gemma-3-1b")[:6] == [512] * 5 + [None]
    assert windows("gemma-2-9b")[:2] == [4096, None]
