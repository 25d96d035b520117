// The probes and judges of `birkhoff doctor`, a pair for each check (check.h). docs/doctor.md
// describes what each finds.
#pragma once

#include "launcher/doctor/check.h"

namespace birkhoff {

// Checks of the job: job_checks.cpp.
Facts probe_world(const Subject& subject);
Judgement judge_world(const Answers& answers);
Facts probe_program(const Subject& subject);
Judgement judge_program(const Answers& answers);
Facts probe_configuration(const Subject& subject);
Judgement judge_configuration(const Answers& answers);
Facts probe_corpus(const Subject& subject);
Judgement judge_corpus(const Answers& answers);
Facts probe_gpus(const Subject& subject);
Judgement judge_gpus(const Answers& answers);

// Checks of the hosts: host_checks.cpp.
Facts probe_hosts(const Subject& subject);
Judgement judge_hosts(const Answers& answers);
Facts probe_threads(const Subject& subject);
Judgement judge_threads(const Answers& answers);
Facts probe_limits(const Subject& subject);
Judgement judge_limits(const Answers& answers);
Facts probe_clock(const Subject& subject);
Judgement judge_clock(const Answers& answers);
Facts probe_network(const Subject& subject);
Judgement judge_network(const Answers& answers);
Facts probe_memory_files(const Subject& subject);
Judgement judge_memory_files(const Answers& answers);

// Checks of the files: file_checks.cpp.
Facts probe_run_folder(const Subject& subject);
Judgement judge_run_folder(const Answers& answers);
Facts probe_space(const Subject& subject);
Judgement judge_space(const Answers& answers);

// Speed: speed_checks.cpp.
Facts probe_matrix_speed(const Subject& subject);
Judgement judge_matrix_speed(const Answers& answers);
Facts probe_memory_speed(const Subject& subject);
Judgement judge_memory_speed(const Answers& answers);
Facts probe_exchange_speed(const Subject& subject);
Judgement judge_exchange_speed(const Answers& answers);
// The rounds of exchange speed: in each, the partner of each rank, or -1. With several hosts,
// partners are on different hosts, so that the network is measured, and all hosts have the same
// number of pairs at a time, so that they share it equally. If hosts have different numbers of
// ranks, ranks without a counterpart on the smallest host have no partner.
std::vector<std::vector<int>> exchange_rounds(const std::vector<std::string>& host_of_rank);

}  // namespace birkhoff
