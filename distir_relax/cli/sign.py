"""The commands `distir sign` and `distir verify`."""

from __future__ import annotations

import json as json_
from pathlib import Path
from typing import Annotated

import typer

from distir_relax.cli.app import app
from distir_relax.cli.options import BundleArgument, JsonOption
from distir_relax.errors import SignatureError
from distir_relax.support.units import count


@app.command()
def sign(
    bundle: Annotated[Path | None, typer.Argument(metavar="BUNDLE", help="A folder that distir compile wrote.")] = None,
    key: Annotated[Path | None, typer.Option(metavar="KEY.pem", help="The private key to sign with.")] = None,
    new_key: Annotated[
        Path | None, typer.Option(metavar="KEY.pem", help="Make a private key, and the public key KEY.pub.")
    ] = None,
) -> None:
    """Sign a bundle with an Ed25519 key, so that distir run --require-signature accepts it, or make such a key.

    A bundle is refused if its files are not those of its manifest. The signature is written to signature.json in it.
    """
    from distir_relax.bundle import PrivateKey, create_key, sign_bundle

    if new_key is not None:
        if bundle is not None or key is not None:
            raise SignatureError(
                f"expected --new-key alone, found {'a bundle' if key is None else '--key'}, too",
                hint="make the key first, then sign: distir sign BUNDLE --key KEY.pem",
            )
        public = create_key(new_key)
        typer.echo(f"wrote {new_key}, which only you can read: keep it secret, it has no password")
        typer.echo(f"wrote {public.path}, for those who run your bundles; sha256 {public.fingerprint}")
        return
    if bundle is None or key is None:
        raise SignatureError(
            f"expected a bundle and --key, found no {'bundle' if bundle is None else '--key'}",
            hint="distir sign BUNDLE --key KEY.pem; distir sign --new-key KEY.pem makes a key",
        )
    signature = sign_bundle(bundle, PrivateKey.read(key))
    typer.echo(f"signed {bundle} with the key {signature.key}")


@app.command()
def verify(
    bundle: BundleArgument,
    key: Annotated[
        Path | None, typer.Option(metavar="KEY.pub", help="The public key that must have signed the bundle.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Check the checksums of all files of a bundle, weights too, and its signature; print where it comes from.

    Its programs are checked by distir check.
    """
    from distir_relax.bundle import verify_bundle
    from distir_relax.report.provenance import provenance_json, provenance_lines

    found = verify_bundle(bundle, key)
    manifest, signature = found.bundle.manifest, found.signature
    if json:
        signed = None if signature is None else {"key": signature.key, "checked": found.checked}
        plain = {"name": manifest.name, "files": found.files, "bytes": found.size, "signature": signed}
        typer.echo(json_.dumps(plain | provenance_json(manifest)))
        return
    outside = len(manifest.weight_files)
    elsewhere = f", and {count(outside, 'file')} of weights outside" if outside else ""
    typer.echo(f"{bundle}: {count(found.files, 'file')} of {found.size:,} bytes{elsewhere} as in the manifest")
    if signature is None:
        typer.echo("  signed   by nobody")
    else:
        how = "" if found.checked else "; not checked, since no --key was given"
        typer.echo(f"  signed   by the key {signature.key}{how}")
    for line in provenance_lines(manifest):
        typer.echo(f"  {line}")
