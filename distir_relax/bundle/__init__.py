"""Bundle folders, written by the compiler and read by the ranks. The format is in docs/bundle.md."""

from __future__ import annotations

from distir_relax.bundle.bundle import RECORDS_FILE, SEARCH_FILES, STAGE_FILES, Bundle
from distir_relax.bundle.call_signature import CallManifest
from distir_relax.bundle.manifest import (
    BACKENDS,
    FORMAT,
    Division,
    Encoder,
    Manifest,
    Program,
    Shard,
    State,
    Tensor,
    WeightFile,
    local_bytes,
    local_intervals,
    local_shape,
)
from distir_relax.bundle.provenance import FileDigest, Origin, Provenance, SourceFile
from distir_relax.bundle.read import (
    BundleFile,
    ReadOptions,
    check_weights,
    file_of,
    other_checksums,
    other_weights,
    read_bundle,
    weights_identity,
)
from distir_relax.bundle.signature import PrivateKey, PublicKey, Signature, create_key
from distir_relax.bundle.training_manifest import AVERAGED, OWN_STEP, STEP_COUNT, TrainingManifest
from distir_relax.bundle.verify import VerifiedBundle, sign_bundle, verify_bundle
from distir_relax.bundle.weight_files import StoredWeights, model_files
from distir_relax.bundle.weights import OnWritten, TensorWeights, WeightSource, safetensors_header, save_weights
from distir_relax.bundle.weights_file import FileTensor, FileWeights, StoredGroups, drawn_weights
from distir_relax.bundle.write import write_bundle

__all__ = [
    "AVERAGED",
    "BACKENDS",
    "FORMAT",
    "OWN_STEP",
    "RECORDS_FILE",
    "SEARCH_FILES",
    "STAGE_FILES",
    "STEP_COUNT",
    "Bundle",
    "BundleFile",
    "CallManifest",
    "Division",
    "Encoder",
    "FileDigest",
    "FileTensor",
    "FileWeights",
    "Manifest",
    "OnWritten",
    "Origin",
    "PrivateKey",
    "Program",
    "Provenance",
    "PublicKey",
    "ReadOptions",
    "Shard",
    "Signature",
    "SourceFile",
    "State",
    "StoredGroups",
    "StoredWeights",
    "Tensor",
    "TensorWeights",
    "TrainingManifest",
    "VerifiedBundle",
    "WeightFile",
    "WeightSource",
    "check_weights",
    "create_key",
    "drawn_weights",
    "file_of",
    "local_bytes",
    "local_intervals",
    "local_shape",
    "model_files",
    "other_checksums",
    "other_weights",
    "read_bundle",
    "safetensors_header",
    "save_weights",
    "sign_bundle",
    "verify_bundle",
    "weights_identity",
    "write_bundle",
]
