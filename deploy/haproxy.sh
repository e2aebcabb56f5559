#!/bin/sh
# HAProxy as Serve starts it (-db -f FILE ...), but
# - without splice(): Serve's configuration asks for it, and HAProxy 2.8 then overlooks clients that leave while they
#   wait for a response, keeps their requests running, and spins on a core;
# - with the admin socket for its owner only, and the statistics on loopback;
# - on this machine alone (WARMROOT_HTTP_HOST is set): metrics on loopback, and only the endpoint where it is wanted;
# - with TLS where WARMROOT_SSL_CERTFILE names a certificate.
set -eu
: "${WARMROOT_HAPROXY:?path of the haproxy binary}"
file=
for word; do
    [ "${last:-}" != -f ] || file=$word
    last=$word
done
[ -n "$file" ] || exec "$WARMROOT_HAPROXY" "$@"

folder=$(dirname "$file")
tls=
if [ -n "${WARMROOT_SSL_CERTFILE:-}" ]; then
    # The file of a certificate's key has its name and .key: HAProxy finds it so.
    ln -sfn "$WARMROOT_SSL_CERTFILE" "$folder/endpoint.pem"
    [ -z "${WARMROOT_SSL_KEYFILE:-}" ] || ln -sfn "$WARMROOT_SSL_KEYFILE" "$folder/endpoint.pem.key"
    tls=" ssl crt $folder/endpoint.pem"
    if [ -n "${WARMROOT_SSL_CA_CERTS:-}" ]; then
        ln -sfn "$WARMROOT_SSL_CA_CERTS" "$folder/clients.pem"
        tls="$tls ca-file $folder/clients.pem verify required"
    fi
fi
endpoint=${WARMROOT_HTTP_HOST:-\\2}
sed -i \
    -e '/^ *stats socket /s/ mode 666 / mode 600 /' \
    -e '/^listen stats/,$s/^\( *bind\) \*:/\1 127.0.0.1:/' \
    -e "/^frontend http_frontend/,/^backend /s|^\( *bind\) \(.*\):\([0-9]*\)$|\1 $endpoint:\3$tls|" \
    "$file"
if [ -n "${WARMROOT_HTTP_HOST:-}" ]; then
    sed -i -e '/^frontend prometheus/,/^frontend http/s/^\( *bind\) :/\1 127.0.0.1:/' "$file"
fi
if [ -n "$tls" ]; then
    "${WARMROOT_PYTHON:-python3}" -I "$(dirname "$0")/renewal.py" "$file" $$ &
fi
exec "$WARMROOT_HAPROXY" -dS "$@"
