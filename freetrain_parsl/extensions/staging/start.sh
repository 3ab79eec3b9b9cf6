#!/bin/bash
# start.sh IMAGE BYTES SPREAD PYTHON COMMAND …: unpack IMAGE (image-SHA256.tar.gz) once on this node, and run COMMAND.
# In COMMAND, each word PYTHON, the shared interpreter, is replaced by the image's. BYTES is the size of the unpacked
# image. Only programs of the node's own system run here: Python from the shared file system would read its library there.
# It goes to the first of the directories FREETRAIN_IMAGE_PLACES that suits. If anything fails, COMMAND runs as it stands; the variable FREETRAIN_IMAGE_FAULT and a line of error output say why.
set -u
umask 077
image=$1 bytes=$2 spread=$3 python=$4
shift 4
name=${image##*/} name=${name%.tar.gz} hash=${name#image-}
path=$PATH
PATH=/usr/bin:/bin:/usr/sbin:/sbin  # directories of the environment, which are often before these, are shared
user=$(id -u)
sent=/tmp/freetrain-$user-$name.tar.gz  # where `sbcast` has put it

plain() {
    export FREETRAIN_IMAGE_FAULT=$1
    echo "freetrain: this node starts without an image: $1" >&2
    unset FREETRAIN_IMAGE
    PATH=$path
    exec "${command[@]}"
}
mine() { [ -d "$1" ] && [ ! -L "$1" ] && [ "$(stat -c '%u %a' "$1")" = "$user 700" ]; }
suits() {  # its own directory there is private, on this node, has room, and may hold programs
    local type free limit code
    type=$(stat -f -c %T "$1" 2>/dev/null) || return 1
    case $type in nfs*|lustre|gpfs|fuse*|ceph|smb*|cifs|afs|panfs|beegfs|pvfs*|UNKNOWN*) return 1;; esac
    if [ "$type" = tmpfs ]; then  # it is memory, of which training needs most
        free=$(awk '/^MemAvailable:/ {print $2}' /proc/meminfo)
        limit=$((${SLURM_MEM_PER_NODE:-0} * 1024))  # 0: all
        [ $limit -gt 0 ] && [ $limit -lt "$free" ] && free=$limit
        [ "$free" -ge $((bytes / 1024 * 10)) ] || { why="$1 is memory, and ten times the image is not free"; return 1; }
    fi
    free=$(df -Pk "$1" | awk 'NR == 2 {print $4}')
    [ "$free" -ge $((bytes / 1024 * 2)) ] || { why="$1 has only $free kB free"; return 1; }
    mkdir -m 700 "$1/freetrain-$user" 2>/dev/null
    mine "$1/freetrain-$user" || { why="$1/freetrain-$user is not a private directory of this user"; return 1; }
    printf '#!/bin/sh\n' > "$1/freetrain-$user/.x.$$" && chmod 700 "$1/freetrain-$user/.x.$$" && "$1/freetrain-$user/.x.$$" 2>/dev/null
    code=$?
    rm -f "$1/freetrain-$user/.x.$$"
    [ $code = 0 ] || why="$1 may not hold programs"
    return $code
}
choose() {
    local places place
    IFS=: read -r -a places <<< "${FREETRAIN_IMAGE_PLACES:-/dev/shm:${SLURM_TMPDIR:-}:${TMPDIR:-}:/tmp}"
    for place in "${places[@]}"; do
        [ -n "$place" ] && [ -d "$place" ] && suits "$place" && { cache=$place/freetrain-$user; return; }
    done
    return 1
}
unpack() {  # by whoever holds the lock; a killed one leaves .part, which the next one removes
    local part=$cache/.part source=$image
    # Under another name at once: nobody must find a part of one, also if this process is killed.
    find "$cache" -mindepth 1 -maxdepth 1 \( -name 'image-*' -o -name 'data-*' \) ! -name '*.part' -mtime +0 -exec flock -n -x {} mv -T {} {}.part \; 2>/dev/null
    rm -rf "$cache"/.part* "$cache"/*.part
    if [ -f "$sent" ] && [ ! -L "$sent" ] && [ "$(stat -c %u "$sent")" = "$user" ]; then
        source=$sent
    elif [ "$spread" != 0 ]; then  # the nodes of a block do not all read at the same moment
        sleep "$(awk -v s="$spread" -v r=$RANDOM 'BEGIN {printf "%.2f", s * r / 32768}')" 9>&-
    fi
    cp "$source" "$part.gz" || { why="$source could not be copied to $cache"; return 1; }
    [ "$source" = "$sent" ] && rm -f "$sent"
    [ "$(sha256sum < "$part.gz" | cut -d' ' -f1)" = "$hash" ] || { why="$source is damaged"; return 1; }
    mkdir "$part" && tar -xzPf "$part.gz" -C "$part" --no-same-owner || { why="it could not be unpacked in $cache"; return 1; }
    rm -f "$part.gz"
    mv -T "$part" "$target" || { why="$target could not be made"; return 1; }
    echo "freetrain: $name was unpacked in $cache" >&2
}
hold() {  # keep the image while this process, which becomes the pilot, lives: the last one may remove it
    exec 8< "$target" && flock -s -n 8 && [ -e "$target/image.json" ] && return
    exec 8<&-
    return 1
}
command=("$@")
why="there is no place for it on this node"
[ -z "${PYTHONHOME:-}" ] || plain "PYTHONHOME is set"
for program in awk cp cut df find flock gzip mv rm sha256sum stat tar; do
    command -v $program >/dev/null || plain "this node has no program $program"
done
choose || plain "$why"
target=$cache/$name
hold 2>/dev/null || {
    exec 9> "$cache/lock" && flock -w 120 9 || plain "the lock $cache/lock is held for two minutes"
    hold 2>/dev/null || { unpack && hold; } || { rm -rf "$cache"/.part* "$cache"/*.part; plain "$why"; }
    exec 9>&-
}
touch "$target" 2>/dev/null  # for the removal by age
export FREETRAIN_IMAGE=$target
[ "$(stat -f -c %T "$cache")" = tmpfs ] && export FREETRAIN_NODE_FILES=8:$target  # memory: the last pilot removes it
[ -e "$target/no-user-site" ] && export PYTHONNOUSERSITE=1
for word in "${!command[@]}"; do
    [ "${command[$word]}" = "$python" ] && command[$word]=$target/bin/python
done
PATH=$path
exec "${command[@]}"
