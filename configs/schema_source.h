// The schema with its comments, which the code that protoc generates leaves out.
#pragma once

#include <cstddef>

namespace birkhoff {

// A serialized FileDescriptorSet of the .proto files; made by configs/embed.cmake.
extern const unsigned char kSchemaSource[];
extern const std::size_t kSchemaSourceBytes;

}  // namespace birkhoff
