#!/bin/busybox sh
# Process 1 of a lab guest: from nothing to one running workload. What it should do comes on the
# kernel's command line as overbook.<key>=<value>.
export PATH=/bin
/bin/busybox mkdir -p /proc /sys /dev
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox --install -s /bin

total_kb() { awk '/^MemTotal/ { print $2; exit }' /proc/meminfo; }
# Before the balloon driver comes and takes some.
whole_kb=$(total_kb)
if grep -q overbook.no_balloon /proc/cmdline; then rm /modules/*-virtio_balloon; fi
if ! grep -q overbook.root /proc/cmdline; then rm /modules/*-overlay; fi
for module in /modules/*; do insmod $module; done
# The initramfs is guest memory: what is no longer needed goes.
rm -r /modules

run= balloon_kb=0
for word in $(cat /proc/cmdline); do
    case $word in
        overbook.run=*) run=${word#*=} ;;
        overbook.balloon_kb=*) balloon_kb=${word#*=} ;;
        # By the kernel's own command line it is overwritten when the driver comes (Linux 6.1).
        overbook.reporting_order=*)
            echo ${word#*=} > /sys/module/page_reporting/parameters/page_reporting_order ;;
        overbook.name=*) hostname ${word#*=} ;;
    esac
done

# Disks are known by their serial: swap, data, root.
for disk in /sys/block/vd*; do
    [ -e $disk/serial ] || continue
    ln -s ${disk##*/} /dev/$(cat $disk/serial)
done
if [ -e /dev/swap ]; then
    # Like a hard disk: the kernel then reads ahead in swap.
    echo 1 > /sys/block/$(readlink /dev/swap)/queue/rotational
    mkswap /dev/swap > /dev/null
    swapon /dev/swap
fi

# All guests read the same root disk; what one writes stays in its memory.
within=
if [ -e /dev/root ]; then
    mkdir /lower /fresh /debian
    mount -t ext4 -o ro /dev/root /lower
    mount -t tmpfs -o size=90% fresh /fresh
    mkdir /fresh/upper /fresh/work
    mount -t overlay -o lowerdir=/lower,upperdir=/fresh/upper,workdir=/fresh/work root /debian
    for dir in proc sys dev; do mount -o bind /$dir /debian/$dir; done
    touch /debian/overbook-guest
    mount -o bind /overbook-guest /debian/overbook-guest
    ifconfig lo 127.0.0.1 up
    within="chroot /debian"
fi

# The workload starts in the memory that the guest is provisioned with, not in what it may grow to.
tries=0
while [ $(total_kb) -gt $((whole_kb - balloon_kb)) ] && [ $tries -lt 300 ]; do
    tries=$((tries + 1))
    usleep 50000
done

stty -F /dev/ttyS1 raw -echo
echo "overbook: up after $(cut -d' ' -f1 /proc/uptime) s" > /dev/console
if [ -n "$run" ]; then
    IFS=,
    set -- $run
    unset IFS
    $within /overbook-guest "$@" > /dev/ttyS1 2> /dev/console
    echo "overbook: workload ended with exit code $?" > /dev/console
fi
while :; do sleep 3600; done
