// SPDX-License-Identifier: Apache-2.0
// Facts about a checkpoint, from its metadata. inspect_report.h turns them into text or JSON.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "formats/registry.h"
#include "lib/infer/mesh_inference.h"
#include "lib/model/parts.h"
#include "tools/job_options.h"

namespace reshard::tools {

// The `kind` of a tensor in JSON, by StateKind.
inline constexpr std::array<const char*, 3> kKindNames = {"model", "optimizer", "other"};
inline constexpr std::size_t kShownObjects = 4;  // and names of tensors of one kind

struct FileFacts {
  Index count = 0;
  Index bytes = 0;  // sizes of the existing files; expected sizes if all are missing
  Index missing = 0;
  std::vector<std::uint32_t> cut_short;
  std::vector<Index> needed;  // least size of each file, bytes

  bool metadata_only() const { return missing == count && count > 0; }
  bool is_complete() const { return missing == 0 && cut_short.empty(); }
};

struct KindFacts {
  Index tensors = 0;
  Index elements = 0;
  Index bytes = 0;
  std::set<std::string_view> dtypes;
  std::vector<std::string> names;  // optimizer state: exp_avg, ...; other tensors: the first few
};

struct Inspection {
  std::string path;  // as the user gave it
  std::string part;  // the part that is shown; empty: all
  const Format* format = nullptr;
  std::unique_ptr<Reader> reader;
  FileFacts files;
  InferredMesh mesh;
  std::array<KindFacts, 3> kinds;   // by StateKind
  std::string packed;               // "14 weights packed as GPTQ"; empty: none
  std::string adapter;              // "LoRA of rank 8, ..."; empty: it has none
  std::optional<Index> parameters;  // elements of the model with its weights unpacked; nothing if that is unknown
  Index object_count = 0;
  std::vector<std::pair<std::string, std::string>> objects;  // the most informative ones and their values

  const Catalog& catalog() const { return reader->catalog(); }
  template <class Named>
  bool shows(const Named& named) const {
    return is_of_part(named.key(), part);
  }
};

// Opens the checkpoint and inspects its metadata. Does not look into directories of data files. With `skip_damaged`,
// leaves out files that cannot be read if the others are of use without them.
Result<Inspection> look_at(const std::string& path, const SourceOptions& options, bool skip_damaged = false);

// Returns a sentence for each unreadable file and each kind of missing or truncated one, and for the tensors that lack
// parts; none for a complete checkpoint or metadata alone.
std::vector<std::string> problems(const Inspection& in);

// Returns "complete", or a phrase that says what is missing or truncated.
std::string completeness(const Inspection& in);

}  // namespace reshard::tools
