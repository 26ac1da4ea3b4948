// SPDX-License-Identifier: Apache-2.0
#include "tools/outputs.h"

#include <algorithm>
#include <set>
#include <string_view>
#include <utility>

#include "formats/open.h"
#include "lib/base/choices.h"
#include "lib/base/file.h"
#include "lib/base/output_guard.h"
#include "lib/base/storage/url.h"
#include "lib/base/text.h"
#include "lib/checkpoint/side_files.h"
#include "lib/output/work_directory.h"
#include "tools/job.h"

namespace reshard::tools {
namespace {

// Adds the files that commands may read in a directory besides the tensors. Looks each up by name, because listing a
// directory may block on unreachable network mounts.
Status add_side_files(const std::string& directory, std::vector<std::string>& out) {
  std::set<std::string_view> names = {kConfigFile, kManifestFile};
  for (const Format* format : formats())
    for (const std::string_view name : format->side_files)
      if (name.find_first_of("*?[{") == std::string_view::npos) names.insert(name);
  for (const std::string_view name : names)
    if (const std::string path = path_join(directory, name); TRY(path_exists(path))) out.push_back(path);
  return {};
}

Result<std::vector<std::string>> inputs_of(const std::vector<std::string>& read) {
  std::vector<std::string> out;
  for (const std::string& path : read) {
    if (!is_url(path) && !TRY(path_exists(path))) continue;
    out.push_back(path);
    if (is_url(path)) continue;  // what is in it counts, and asking about each name takes a request
    const std::string home = TRY(is_directory(path)) ? path : parent_path(path);
    TRY(add_side_files(home, out));
    TRY(add_side_files(path_join(home, ".."), out));
  }
  return out;
}

Status check_replaces_report(const std::string& path, const ReportKind& kind) {
  const auto there = TRY(entry_at(path));
  if (!there) return {};
  if (there->is_directory) return usage_error(printable(path) + ": is a directory; expected a file");
  if (TRY(read_file_start(path, kMarkBytes)).find(kind.mark) != std::string::npos || there->size == 0) return {};
  return usage_error(printable(path) + ": is not " + std::string(kind.name) +
                     ", so it will not be overwritten; choose another file, or remove it first");
}

Status check_reports(const std::vector<PathsOfLine::Report>& reports) {
  std::set<std::string_view> seen;
  for (const PathsOfLine::Report& report : reports) {
    if (!seen.insert(report.path).second)
      return usage_error(printable(report.path) + ": is given for two reports; choose two files");
    TRY(check_report(report.path, *report.kind));
  }
  return {};
}

Status check_outputs(const PathsOfLine& paths) {
  if (paths.written.empty()) return {};
  const std::vector<std::string> inputs = TRY(inputs_of(paths.read));
  for (const std::string& output : paths.written) {
    TRY(check_spares_inputs(output, inputs));
    if (is_url(output)) continue;
    for (const std::string& made_in : {work_directory(output), publishing_directory(output)})
      if (TRY(path_exists(made_in))) TRY(check_spares_inputs(made_in, inputs));
  }
  return check_reports(paths.reports);
}

// A path that leads to nothing, and the existing one that was probably meant.
struct MistypedPath {
  std::string given, meant;
};

// Returns the inputs, and the directories of outputs, that do not exist but are near to a path that does.
std::vector<MistypedPath> mistyped_paths(const PathsOfLine& paths) {
  std::vector<std::string> given = paths.read;
  for (const std::string& output : paths.written) given.push_back(parent_path(output));
  std::vector<MistypedPath> out;
  for (const std::string& path : given)
    if (std::string meant = near_path(path); !meant.empty()) out.push_back({path, std::move(meant)});
  return out;
}

// Adds "; did you mean step-1000?" to an error about one of the paths.
Error with_meant_path(Error error, const std::vector<MistypedPath>& mistyped) {
  for (const auto& [given, meant] : mistyped)
    if (error.code() == ErrorCode::kIo && error.message().find(printable(given) + ": ") != std::string::npos)
      return io_error(error.message() + meant_text(meant));
  return error;
}

InputFacts facts_of_files(const std::string& path, const std::vector<std::string>& files) {
  InputFacts out{.path = path};
  for (const std::string& file : files) {
    const auto entry = entry_at(file);
    if (!entry || !*entry) continue;
    ++out.files;
    out.bytes += (*entry)->size;
    out.newest_ns = std::max(out.newest_ns, (*entry)->mtime_ns);
  }
  return out;
}

}  // namespace

Action checking_paths(const Action& action, const PathsOfLine& paths) {
  return [action, paths, mistyped = mistyped_paths(paths)]() -> Result<int> {
    if (leads()) TRY(check_outputs(paths));
    auto code = action();
    if (!code) return with_meant_path(std::move(code).error(), mistyped);
    return code;
  };
}

Status check_report(const std::string& path, const ReportKind& kind) {
  if (const std::string home = parent_path(path); !TRY(is_directory(home)))
    return io_error(printable(path) + ": cannot create: " + printable(home) + ": no such directory");
  TRY(check_replaces_report(path, kind));
  return kind.is_appended_to ? Status() : check_can_replace(path);
}

Status replace_report(const std::string& path, const ReportKind& kind, std::string_view text) {
  TRY(check_replaces_report(path, kind));
  return replace_file(path, text);
}

Status check_is_bucket(const std::string& url) {
  if (is_bucket_url(url)) return {};
  return usage_error(printable(url) + ": cannot be written to; expected a local path, s3:// or gs://");
}

void add_state(CommandLine& line, std::string& state) {
  line.add_option("--state", state, "Keep the journal of an output in a bucket in DIR, not in the bucket")
      .written()
      .takes("DIR");
}

Status check_state(const std::string& state, const std::string& destination) {
  if (state.empty() || is_url(destination)) return {};
  return usage_error("--state is for an output in a bucket; that of a local output is in " + destination + ".partial");
}

std::vector<std::string> files_of(const Catalog& catalog) {
  std::vector<std::string> out = catalog.file_paths();
  for (const std::string& name : catalog.metadata_files) out.push_back(path_join(catalog.root, name));
  if (!catalog.latest_file.empty()) out.push_back(path_join(catalog.root, catalog.latest_file));
  return out;
}

InputFacts facts_of(const std::string& path, const Catalog& catalog) { return facts_of_files(path, files_of(catalog)); }
InputFacts facts_of_file(const std::string& path) { return facts_of_files(path, {path}); }

Opener NotedInputs::opener() {
  return [this](const std::string& path, const OpenOptions& options) -> Result<OpenCheckpoint> {
    OpenCheckpoint open = TRY(open_checkpoint(path, options));
    add(path, open.reader->catalog());
    return open;
  };
}

void NotedInputs::add(const std::string& path, const Catalog& catalog) { noted_.push_back({path, files_of(catalog)}); }

Status NotedInputs::check(const std::string& output) const {
  if (output.empty()) return {};
  for (const Noted& noted : noted_) TRY(check_spares_inputs(output, noted.files));
  return {};
}

std::vector<InputFacts> NotedInputs::facts() const {
  std::vector<InputFacts> out;
  for (const Noted& noted : noted_)
    if (std::none_of(out.begin(), out.end(), [&](const InputFacts& f) { return f.path == noted.path; }))
      out.push_back(facts_of_files(noted.path, noted.files));
  return out;
}

}  // namespace reshard::tools
