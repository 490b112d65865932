"""Replay by real processes: a daemon, clients that paint and read back what they are given, clocks kept together."""

from kvslot.replay.processes.daemon import DaemonFault
from kvslot.replay.processes.parent import ProcessFault, ProcessSettings, check, replay_processes

__all__ = ["DaemonFault", "ProcessFault", "ProcessSettings", "check", "replay_processes"]
