"""The `python` of forkrun.py: asks its server for a fork, passes signals on to it, and ends as it does.

python -I -S fork_client.py SOCKET [what follows `python` on a command line]
"""

import json
import os
import signal
import socket
import sys

OWN = {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGPIPE}  # all others are passed on

path, *command = sys.argv[1:]
if not command or (command[0].startswith("-") and command[0] not in ("-u", "-m", "-c")):
    os.execv(sys.executable, [sys.executable, *command])
job = {"command": command, "num_ranks": 0, "env": dict(os.environ), "cwd": os.getcwd()}
connection = socket.socket(socket.AF_UNIX)
connection.connect(path)
data = json.dumps(job).encode() + b"\n"
sent = socket.send_fds(connection, [data], [0, 1, 2])
connection.sendall(data[sent:])
for number in signal.valid_signals() - OWN:
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, lambda number, _: connection.sendall(bytes([number])))
code = int(connection.makefile().readline() or "1")
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
