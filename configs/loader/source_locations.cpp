#include "configs/loader/source_locations.h"

#include <google/protobuf/descriptor.h>

#include "configs/loader/message_text.h"

namespace birkhoff {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

// Clears the lists in `config` that `later` replaces. Forgets the locations of replaced lists and
// oneof members.
void drop_replaced(Message& config, const Message& later, const std::string& path,
                   SourceLocations& places) {
  const Reflection& reflection = *config.GetReflection();
  for (const FieldDescriptor* field : set_fields(later)) {
    const std::string field_path = join_path(path, field->name());
    if (field->is_repeated()) {
      reflection.ClearField(&config, field);
      places.forget(field_path);
    } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      if (const auto* oneof = field->real_containing_oneof()) {
        const FieldDescriptor* chosen = reflection.GetOneofFieldDescriptor(config, oneof);
        if (chosen != nullptr && chosen != field) {
          places.forget(join_path(path, chosen->name()));
        }
      }
      if (reflection.HasField(config, field)) {
        drop_replaced(*reflection.MutableMessage(&config, field),
                      later.GetReflection()->GetMessage(later, field), field_path, places);
      }
    }
  }
}

}  // namespace

void SourceLocations::forget(const std::string& path) {
  places_.erase(path);
  const std::string below = path + ".";
  auto it = places_.lower_bound(below);
  while (it != places_.end() && it->first.starts_with(below)) it = places_.erase(it);
}

void SourceLocations::add(const SourceLocations& other) {
  for (const auto& [path, place] : other.places_) places_[path] = place;
}

const std::string& SourceLocations::of(const std::string& path) const {
  for (std::string part = path;;) {
    if (const auto it = places_.find(part); it != places_.end()) return it->second;
    const std::size_t dot = part.rfind('.');
    if (dot == std::string::npos) return whole_;
    part.resize(dot);
  }
}

std::string join_path(const std::string& path, const std::string& name) {
  return path.empty() ? name : path + "." + name;
}

void override_config(Message& config, SourceLocations& places, const Message& later,
                     const SourceLocations& later_places) {
  drop_replaced(config, later, "", places);
  config.MergeFrom(later);
  places.add(later_places);
}

}  // namespace birkhoff
