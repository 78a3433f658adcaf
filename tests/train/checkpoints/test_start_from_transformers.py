"""Checkpoints of transformers, built here from a configuration and saved as that library saves them, as sources."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.sessions import lone_session

from elastune.core.errors import UserError
from elastune.core.journal.records import Record, StartedFrom

SMALL = {"n_layer": 2, "n_embd": 8, "n_head": 2, "n_positions": 16, "vocab_size": 11, "pad_token_id": 0}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model whose head is tied to its embedding: model.safetensors."""
    from transformers import GPT2Config, GPT2LMHeadModel  # takes long to import

    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("pretrained")
    GPT2LMHeadModel(GPT2Config(**SMALL)).save_pretrained(folder)
    return folder / "model.safetensors"


def test_a_classifier_takes_the_body_and_begins_its_head(pretrained: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import GPT2Config, GPT2ForSequenceClassification

    torch.manual_seed(2)
    sent: list[Record] = []
    session, model = lone_session(tmp_path, send=sent.append), GPT2ForSequenceClassification(GPT2Config(**SMALL))
    head = model.score.weight.detach().clone()
    report_of_start = session.start_from(model, pretrained)
    assert report_of_start.fresh == {"score.weight": "not in the source"}
    assert [record.fresh for record in sent if isinstance(record, StartedFrom)] == [report_of_start.fresh]
    source, own = load_file(pretrained), model.state_dict()
    assert set(own) - {"score.weight"} <= set(source)
    assert all(torch.equal(own[name], source[name]) for name in own if name != "score.weight")
    assert torch.equal(model.score.weight, head)
    groups = [
        {"params": [p], "lr": 0.1 if name in report_of_start.fresh else 0.01} for name, p in model.named_parameters()
    ]
    model, optimizer = session.prepare(model, torch.optim.SGD(groups))
    for _ in session.epochs(1):
        data = torch.utils.data.TensorDataset(torch.randint(1, 11, (8, 5)), torch.randint(2, (8,)))
        for x, y in session.batches(data, batch_size=4):
            session.backward(model(input_ids=x, labels=y).loss)
            optimizer.step()
            optimizer.zero_grad()
    assert session.step == 2
    assert not torch.equal(model.score.weight, head)


def test_a_tied_head_is_taken_with_what_it_is_tied_to(pretrained: Path, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(**SMALL))
    assert lone_session(tmp_path / "one").start_from(model, pretrained).fresh == {}
    with pytest.raises(UserError, match="tied to what is taken"):
        lone_session(tmp_path / "two").start_from(model, pretrained, fresh=["lm_head.*"])
    result = lone_session(tmp_path / "three").start_from(model, pretrained, fresh=["lm_head.*", "transformer.wte.*"])
    assert set(result.fresh) == {"lm_head.weight", "transformer.wte.weight"}


def test_names_of_a_bare_body_get_a_beginning(pretrained: Path, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2Model

    result = lone_session(tmp_path).start_from(GPT2Model(GPT2Config(**SMALL)), pretrained, rename={"transformer.": ""})
    assert result.fresh == {}
