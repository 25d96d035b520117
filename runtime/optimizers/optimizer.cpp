#include "runtime/optimizers/optimizer.h"

#include "cluster/base/error.h"
#include "configs/schema/config.pb.h"
#include "runtime/optimizers/adafactor.h"
#include "runtime/optimizers/adamw.h"

namespace birkhoff {

std::unique_ptr<Optimizer> make_optimizer(const configs::Optimizer& config, GradBuckets& buckets) {
  switch (config.kind_case()) {
    case configs::Optimizer::kAdamw:
    case configs::Optimizer::KIND_NOT_SET:
      return std::make_unique<AdamW>(config.adamw(), buckets);
    case configs::Optimizer::kAdafactor:
      return std::make_unique<Adafactor>(config.adafactor(), buckets);
  }
  require(false, "an optimizer of the schema");
  return nullptr;
}

}  // namespace birkhoff
