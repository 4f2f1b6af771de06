#!/usr/bin/env bash
# Makes the Triton server that the tests use: scripts/triton_env.sh DIRECTORY, then DIRECTORY/bin/tritonserver.
#
# The wheel `nvidia-pytriton` carries a real tritonserver with the Python backend, ensembles and the dynamic batcher; it has
# no onnxruntime, pytorch or tensorrt backend. The Python backend's stub is built for one version of Python, and finds its
# packages through the first `python3` on PATH. Needs Linux on x86-64, glibc 2.35, Python 3.11 (or PYTHON=...) and pip.
set -euo pipefail

place=${1:?"usage: scripts/triton_env.sh DIRECTORY"}
python=${PYTHON:-python3}

"$python" -m venv "$place"
place=$(cd "$place" && pwd)
# With numpy 2 every output of this server's Python backend comes back empty.
"$place/bin/python" -m pip install --quiet --disable-pip-version-check \
	'nvidia-pytriton==0.7.0' 'numpy<2' onnxruntime tokenizers ${TRITON_ENV_PACKAGES:-}

version=$("$place/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
site=$("$place/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
server=$site/pytriton/tritonserver
stub=$server/python_backend_stubs/$version/triton_python_backend_stub
if [ ! -f "$stub" ]; then
	echo "nvidia-pytriton has no stub of the Python backend for Python $version: PYTHON=python3.11 $0 $place" >&2
	exit 1
fi
install -m 755 "$stub" "$server/backends/python/triton_python_backend_stub"
chmod +x "$server/bin/tritonserver"
base=$("$place/bin/python" -c 'import sysconfig; print(sysconfig.get_config_var("LIBDIR") or "")')

cat >"$place/bin/tritonserver" <<END
#!/usr/bin/env bash
# exec, so that whoever started this can stop the server by this process.
export PATH="$place/bin:\$PATH"
export LD_LIBRARY_PATH="$site/nvidia_pytriton.libs:$base\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}"
unset PYTHONPATH PYTHONHOME
exec "$server/bin/tritonserver" --backend-directory="$server/backends" "\$@"
END
chmod +x "$place/bin/tritonserver"
"$place/bin/tritonserver" --help >/dev/null 2>&1 || [ $? -eq 1 ] || {
	echo "$place/bin/tritonserver cannot be started here:" >&2
	"$place/bin/tritonserver" --help >&2 || true
	exit 1
}
echo "$place/bin/tritonserver"
