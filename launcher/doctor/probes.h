// The probes and judges of `birkhoff doctor`, a pair for each check: functions of the types in
// check.h. docs/doctor.md describes what each finds.
#pragma once

#include "launcher/doctor/check.h"

namespace birkhoff {

// Checks of the job: job_checks.cpp.
Probe probe_world, probe_program, probe_configuration, probe_corpus, probe_gpus;
Judge judge_world, judge_program, judge_configuration, judge_corpus, judge_gpus;

// Checks of the hosts: host_checks.cpp.
Probe probe_hosts, probe_threads, probe_limits, probe_clock, probe_network, probe_memory_files;
Judge judge_hosts, judge_threads, judge_limits, judge_clock, judge_network, judge_memory_files;

// Checks of the files: file_checks.cpp.
Probe probe_run_folder, probe_space;
Judge judge_run_folder, judge_space;

// Speed: speed_checks.cpp.
Probe probe_matrix_speed, probe_memory_speed, probe_exchange_speed;
Judge judge_matrix_speed, judge_memory_speed, judge_exchange_speed;
// The rounds of exchange speed: in each, the partner of each rank, or -1. With several hosts,
// partners are on different hosts, so that the network is measured, and all hosts have the same
// number of pairs at a time, so that they share it equally. If hosts have different numbers of
// ranks, ranks without a counterpart on the smallest host have no partner. In each round at most
// `ranks_of_host_together` ranks of a host have one; a pair always has room.
std::vector<std::vector<int>> exchange_rounds(const std::vector<std::string>& host_of_rank,
                                              int ranks_of_host_together);

}  // namespace birkhoff
