// Reader of site profiles (configs/schema/site.proto), with the same limits and errors as for
// configurations.
#pragma once

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>

#include "configs/schema/site.pb.h"

namespace birkhoff {

// Reads a profile and checks every value. ranks_per_node is resolved. Limits: 4 MiB, nesting 100.
// Error(kConfig): "file:line:column: field: what, allowed values, nearest name".
configs::Site load_site(const std::filesystem::path& file);

// A time as sbatch accepts it: "minutes", "minutes:seconds", "hours:minutes:seconds", "days-hours",
// "days-hours:minutes", "days-hours:minutes:seconds". nullopt for any other text, and for more than
// ten years.
std::optional<std::chrono::seconds> slurm_time(const std::string& text);

}  // namespace birkhoff
