#!/bin/sh
# HAProxy as Serve starts it (-db -f FILE ...), but
# - without splice(): Serve's configuration asks for it, and HAProxy 2.8 then overlooks clients that leave while they
#   wait for a response, keeps their requests running, and spins on a core;
# - with the admin socket for its owner only, and the statistics on loopback;
# - on this machine alone (WARMROOT_HTTP_HOST is set): metrics on loopback, and only the endpoint where it is wanted;
# - with an answer of the API's form, 503 with Retry-After, where no ingress can be asked: Serve has plain 500s and 404s
#   for that, of HAProxy and of the proxy that it falls back on, and no client tries a 404 again;
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
body='{"error":{"message":"no ingress can be reached now","type":"service_unavailable","param":null,"code":"ingress_unavailable"}}'
printf %s "$body" > "$folder/unavailable.json"
printf 'HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nContent-Length: %d\r\n\r\n%s' \
    ${#body} "$body" > "$folder/unavailable.http"
unavailable="return status 503 content-type application/json hdr retry-after 1 file $folder/unavailable.json"
endpoint=${WARMROOT_HTTP_HOST:-\\2}
sed -i \
    -e '/^ *stats socket /s/ mode 666 / mode 600 /' \
    -e '/^listen stats/,$s/^\( *bind\) \*:/\1 127.0.0.1:/' \
    -e "/^frontend http_frontend/,/^backend /s|^\( *bind\) \(.*\):\([0-9]*\)$|\1 $endpoint:\3$tls|" \
    -e "s|^\( *errorfile 50[234]\) .*|\1 $folder/unavailable.http|" \
    -e "/^backend default_backend/,/^backend /s|^\( *http-request\) return status 404 .*|\1 $unavailable|" \
    -e '/unavailable.json if { srv_name /d' \
    -e "s|^\( *\)server \([^ ]*\) [^ ]* check backup$|&\\
\1http-response $unavailable if { srv_name \2 } { status 404 500 } !{ res.hdr(content-type) -m beg application/json }|" \
    "$file"
if [ -n "${WARMROOT_HTTP_HOST:-}" ]; then
    sed -i -e '/^frontend prometheus/,/^frontend http/s/^\( *bind\) :/\1 127.0.0.1:/' "$file"
fi
if [ -n "$tls" ]; then
    "${WARMROOT_PYTHON:-python3}" -I "$(dirname "$0")/renewal.py" "$file" $$ &
fi
exec "$WARMROOT_HAPROXY" -dS "$@"
