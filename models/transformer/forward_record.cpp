#include "models/transformer/forward_record.h"

#include "cluster/base/error.h"

namespace birkhoff {
namespace {

thread_local ForwardRecord* forward_record = nullptr;

}  // namespace

ForwardRecord::ForwardRecord() {
  require(forward_record == nullptr, "a thread has one ForwardRecord at a time");
  forward_record = this;
}

ForwardRecord::~ForwardRecord() { forward_record = nullptr; }

ForwardRecord* ForwardRecord::current() { return forward_record; }

}  // namespace birkhoff
