#!/bin/sh
# HAProxy without splice(): Serve's configuration asks for it, and HAProxy 2.8 then overlooks clients that leave while
# they wait for a response, keeps their requests running, and spins on a core.
exec "${WARMROOT_HAPROXY:?path of the haproxy binary}" -dS "$@"
