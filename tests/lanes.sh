#!/usr/bin/env bash
# Runs the tests on real guests; as root in two lanes. Arguments: cargo, `test`, options.
#
# Swap, KSM and cgroups belong to the whole kernel. The tests that set or read them run in the first
# lane, one after another; all others run in the second. Each lane has process ids of its own. No
# daemon sees the VMs of the other lane, and nothing that a test starts outlives its lane.
set -euo pipefail
cd "$(dirname "$0")/.."

# Overbook drives KSM only where it sees every process of the host. `sharing` compares Overbook's count
# of memory with the kernel's; next to another lane they differed, for a reason not yet known.
ALONE=(ksm sharing)
KERNEL_WIDE=(attached cgroup_limit cold dedup disk_files hardening hostile_host hotplug interrupt
	lending libvirt tracking units upgrade)

if [ "$(id -u)" != 0 ]; then
	exec "$@" -p overbook-lab -p overbook-tests
fi

alone=() first=() second=()
for file in tests/*.rs tests/*/main.rs; do
	name=${file#tests/} name=${name%.rs} name=${name%/main}
	[ "$name" != lib ] || continue
	case " ${ALONE[*]} / ${KERNEL_WIDE[*]} " in
	*" $name "*/*) alone+=(--test "$name") ;;
	*/*" $name "*) first+=(--test "$name") ;;
	*) second+=(--test "$name") ;;
	esac
done

# The shell is the first process there, and reaps the processes that lost their parent.
lane() {
	unshare --pid --fork --kill-child --mount-proc sh -c '"$@"; exit $?' sh "$@"
}

"$@" --no-run -p overbook-lab -p overbook-tests
"$@" -p overbook-tests "${alone[@]}"
output=$(mktemp)
lane "$@" -p overbook-tests "${first[@]}" >"$output" 2>&1 &
# The first lane's output comes at the end, in one piece.
trap 'kill -KILL $(jobs -p) 2>/dev/null || :; cat "$output"; rm "$output"' EXIT
lane "$@" -p overbook-lab
lane "$@" -p overbook-tests --lib "${second[@]}"
wait $!
