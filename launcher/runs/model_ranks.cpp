#include "launcher/runs/model_ranks.h"

#include "cluster/base/cpu.h"
#include "cluster/base/error.h"
#include "cluster/base/text/plural.h"
#include "cluster/mesh.h"
#include "configs/schema/config.pb.h"
#include "launcher/processes/ranks.h"
#include "launcher/processes/supervisor.h"
#include "launcher/runs/run_paths.h"
#include "runtime/stopping/signals.h"

namespace birkhoff {

void run_alone(const std::string& device, const std::function<void(const ModelRank&)>& body) {
  compute_on_cpu(threads_of_rank(usable_cores()));
  const at::Device place = device_named(device);
  const auto host = make_single_group(), group = make_single_group(place);
  body({*host, *group, *host, place, [] {}});
}

int run_on_ranks(const RanksOfCommand& where, const std::function<void(const ModelRank&)>& body,
                 std::ostream& err) {
  const int ranks = ranks_to_run_on(where.ranks);
  const bool alone = !where.ranks && ranks == 1;
  check_before_ranks([&] {
    if (!alone) where.check();
    if (ranks % where.tensor != 0) {
      fail(ExitCode::kUsage, "--tensor {}: does not divide {}; start a multiple of {}",
           where.tensor, counted(ranks, "rank"), where.tensor);
    }
    if (where.ranks) {
      check_divides(where.tensor, config_of(checkpoint_of(where.model), where.settings));
    }
  });
  if (alone) {
    run_alone(where.device, body);
    return 0;
  }
  StopSignals signals;
  if (where.ranks) return supervise({ranks}, {}, where.command_line, signals, err).code;
  return run_in_world(
      [&](World& world) {
        compute_on_cpu(threads_of_rank(world.cores()));
        const at::Device device = device_named(where.device, world.local_rank());
        configs::Mesh axes;
        axes.set_tensor(where.tensor);
        // Without tensors to add up, ranks may share a GPU, which NCCL refuses.
        const bool on_device = where.sums_on_device || where.tensor > 1;
        Mesh mesh(world, axes, on_device ? device : at::Device(at::kCPU));
        const auto tick = [&] {
          if (signals.received() == 0) return;
          if (world.rank() == 0)
            err << "birkhoff: stopped on request: " << where.stopped << std::endl;
          world.abort(static_cast<int>(ExitCode::kRequeue));
        };
        body({world.group(), mesh.data(), mesh.data_on_host(), {device, &mesh.tensor()}, tick});
        return 0;
      },
      err);
}

}  // namespace birkhoff
