#!/bin/sh
# Brings Chromium and its driver, in which the tests open the simulator's report page. As root it installs them with apt;
# otherwise it says in one line what to do.
set -eu

command -v chromium >/dev/null && command -v chromedriver >/dev/null && exit 0
wanted="chromium chromium-driver"
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing $wanted, for the tests of the report page"
    export DEBIAN_FRONTEND=noninteractive
    # shellcheck disable=SC2086
    apt-get update -qq && apt-get install -y -qq --no-install-recommends $wanted >/dev/null && exit 0
fi
echo "error: the tests open a page in Chromium, found none: install it, as root: apt-get install $wanted" >&2
exit 1
