"""The data sets: their files, checksums and public addresses. Nothing here touches a disk or the network."""

from __future__ import annotations

from dataclasses import dataclass

from vprop.lab.data.errors import DataError

_LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/"
_FASHION_MNIST = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"


@dataclass(frozen=True)
class DataFile:
    """One file of a data set, known by its checksum wherever it lies."""

    name: str
    folder: str  # where it lies below a data folder; a data folder may also hold it directly
    url: str
    sha256: str
    also_sha256: tuple[str, ...] = ()  # other editions with the same content


@dataclass(frozen=True)
class Spec:
    """A data set as it is loaded: row counts after the split, and the shape of one row (bias included)."""

    name: str
    train_rows: int
    test_rows: int
    shape: tuple[int, ...]
    purpose: str
    files: tuple[DataFile, ...] = ()  # none: it ships with scikit-learn


def _libsvm(name: str, sha256: str, *also_sha256: str) -> DataFile:
    return DataFile(name, "libsvm", _LIBSVM + name, sha256, also_sha256)


def _fashion_mnist(name: str, sha256: str) -> DataFile:
    return DataFile(name, "fashion_mnist", _FASHION_MNIST + name, sha256)


_SPECS = (
    Spec(
        "a1a",
        train_rows=1605,
        test_rows=30956,
        shape=(123,),
        purpose="logistic regression (UCI Adult)",
        files=(
            _libsvm("a1a", "eb54c45f1bdb51286f803dd092eb8202b44637a858fc6c4e533a2d64a0d94b4e"),
            _libsvm("a1a.t", "0212d0c4a3996fe6fb6a0ab54033d9f4fa4b60369b6e3bb141821d9ffc40c04d"),
        ),
    ),
    Spec(
        "australian",
        train_rows=345,
        test_rows=345,
        shape=(15,),
        purpose="logistic regression (credit approval)",
        files=(
            _libsvm(
                "australian_scale",
                # The scaling of the unscaled file in float64, written without the space that ends svm-scale's lines.
                "315d145141663397b7467615444ea83484504bff78de00167a806c4a18023386",
                # The same in svm-scale's layout from values in float32; 39 values differ by 1e-6. Rebuilt to fit a
                # public copy of the published file; not compared with the file at its public home.
                "7482da8cc32fac5c73009b3e80235e09b63b292ebd815203111cf816f1d24ba0",
            ),
        ),
    ),
    Spec(
        "breast_cancer",
        train_rows=284,
        test_rows=285,
        shape=(31,),
        purpose="logistic regression (tumours); needs no file",
    ),
    Spec(
        "fashion_mnist",
        train_rows=60000,
        test_rows=10000,
        shape=(28, 28),
        purpose="image classification (clothing)",
        files=(
            _fashion_mnist(
                "train-images-idx3-ubyte.gz", "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"
            ),
            _fashion_mnist(
                "train-labels-idx1-ubyte.gz", "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"
            ),
            _fashion_mnist(
                "t10k-images-idx3-ubyte.gz", "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"
            ),
            _fashion_mnist(
                "t10k-labels-idx1-ubyte.gz", "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"
            ),
        ),
    ),
)

DATASETS: dict[str, Spec] = {spec.name: spec for spec in _SPECS}


def spec(name: str) -> Spec:
    """The entry of the data set called ``name``."""
    if name not in DATASETS:
        raise DataError(f"Unknown data set {name!r}. Must be one of: {', '.join(DATASETS)}.")
    return DATASETS[name]
