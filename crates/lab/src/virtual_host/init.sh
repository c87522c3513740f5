#!/bin/busybox sh
# Process 1 of a virtual host: makes a Linux host of a kernel, runs /script in it, and says at the
# end of the output how that ended. It writes to the console in case of trouble alone.
export PATH=/usr/local/bin:/usr/bin:/bin HOME=/root TERM=dumb LC_ALL=C.UTF-8
/bin/busybox mkdir -p /proc /sys /tmp /run /etc /var/tmp /usr/bin /files
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox --install -s /bin
ln -s bin /sbin
ln -s /bin/env /usr/bin/env

for module in /modules/*; do insmod $module; done
rm -r /modules

mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs shm /dev/shm
mount -t tmpfs -o mode=1777 tmp /tmp
mount -t tmpfs -o mode=755 run /run
mount -t debugfs debug /sys/kernel/debug
mount -t tracefs trace /sys/kernel/tracing
mount -t cgroup2 cgroup /sys/fs/cgroup
for controller in memory cpu io pids; do
    echo +$controller > /sys/fs/cgroup/cgroup.subtree_control
done
# A disk for swap files, and for what is read past the page cache.
mount -t ext4 /dev/vda /var/tmp
chmod 1777 /var/tmp
ln -s /proc/self/fd /dev/fd
ln -s /proc/self/fd/0 /dev/stdin
ln -s /proc/self/fd/1 /dev/stdout
ln -s /proc/self/fd/2 /dev/stderr
ln -s /proc/mounts /etc/mtab
echo root:x:0:0:root:/root:/bin/sh > /etc/passwd
echo root:x:0: > /etc/group
echo 127.0.0.1 localhost > /etc/hosts
hostname virtual-host
ifconfig lo 127.0.0.1 up

# The port can be opened once, and a pipe as often as a script likes.
mkfifo /run/output
cat /run/output > /dev/vport0p1 &
relay=$!
exec 3> /run/output
echo "virtual host: up after $(cut -d' ' -f1 /proc/uptime) s" > /dev/console
cd /files
TMPDIR=/tmp sh /script < /dev/null >&3 2>&3 3>&- &
script=$!
wait $script
status=$?
# Those that the script has left behind hold the output open.
for exe in /proc/[0-9]*/exe; do
    pid=${exe#/proc/}
    pid=${pid%/exe}
    case $pid in 1 | $relay) continue ;; esac
    readlink $exe > /dev/null && kill -9 $pid 2> /dev/null
done
printf '%s%d\n' "$(cat /mark)" $status >&3
exec 3>&-
wait $relay
echo "virtual host: the script ended with exit code $status" > /dev/console
# The caller ends this host as soon as it has read that.
while :; do sleep 3600; done
