# Runs the CUDA compiler given as arguments. What ptxas tells of registers and spills goes to a log
# beside the object (x.o.ptxas), which the test `spills` reads; the rest is shown.
object=
previous=
for argument in "$@"; do
    [ "$previous" = -o ] && object=$argument
    previous=$argument
done
log=$object.ptxas
"$@" 2>"$log"
status=$?
grep -Ev '^(ptxas info|ptxas warning : Registers are spilled| +[0-9]+ bytes stack frame)' "$log" >&2
if [ $status -ne 0 ] && grep -Eq 'signal (9|15)|[Kk]illed' "$log"; then
    echo "fa101: the compiler was killed, most likely for lack of memory (it may need 4 GB):" \
        "configure again with CMAKE_BUILD_PARALLEL_LEVEL=1" >&2
fi
exit $status
