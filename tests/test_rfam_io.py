"""Saved kernel machines: what comes back, and files that are refused."""

from __future__ import annotations

import pathlib
import pickle
import sys

import numpy as np
import pytest

import normalign
from normalign import RFAMClassifier, RFAMRegressor

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from rfam_oracle import blobs


@pytest.mark.parametrize("labels", [np.array([3, 5, 9]), np.array(["a", "bc", "d"]), None])
def test_save_and_load(tmp_path, labels):
    X, y = blobs(60)
    path = tmp_path / "model.rfam"  # the name is kept as given
    if labels is None:
        model = RFAMRegressor(alpha=0.5).fit(X, np.c_[X[:, 0], X[:, 1]])
    else:
        model = RFAMClassifier(alpha=0.5, random_state=np.random.RandomState(0)).fit(X, labels[y])
    model.save(path)
    again = type(model).load(path)
    np.testing.assert_array_equal(again.predict(X), model.predict(X))
    np.testing.assert_array_equal(again.feature_matrix_, model.feature_matrix_)
    assert again.history_ == model.history_
    assert again.alpha == 0.5
    assert again.random_state is None
    with np.load(path, allow_pickle=False) as file:
        assert all(file[name].dtype != object for name in file.files)


def test_save_keeps_column_names(tmp_path):
    pandas = pytest.importorskip("pandas")
    X, y = blobs(40, 3, classes=2)
    frame = pandas.DataFrame(X, columns=["a", "b", "c"])
    RFAMClassifier().fit(frame, y).save(tmp_path / "m.npz")
    again = RFAMClassifier.load(tmp_path / "m.npz")
    assert again.predict(frame).shape == (40,)
    with pytest.raises(ValueError, match="order"):
        again.predict(frame[["c", "b", "a"]])


def test_load_refuses_other_files(tmp_path, monkeypatch):
    X, y = blobs(30)
    path = tmp_path / "model.npz"
    RFAMClassifier().fit(X, y).save(path)
    with pytest.raises(ValueError, match="holds a RFAMClassifier, not a RFAMRegressor"):
        RFAMRegressor.load(path)
    monkeypatch.setattr(normalign._rfam_io, "VERSION", 0)
    with pytest.raises(ValueError, match="format version 1, this normalign reads up to 0"):
        RFAMClassifier.load(path)
    other = tmp_path / "other.npz"
    np.savez(other, a=np.zeros(3))
    with pytest.raises(ValueError, match="is not a saved RFAM model"):
        RFAMClassifier.load(other)
    other.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="is not a saved RFAM model"):
        RFAMClassifier.load(other)
    other.write_bytes(pickle.dumps({"code": "would run"}))
    with pytest.raises(ValueError, match="is not a saved RFAM model"):
        RFAMClassifier.load(other)
    with pytest.raises(Exception, match="not fitted"):
        RFAMClassifier().save(path)
