// SPDX-License-Identifier: Apache-2.0
#include "tools/watch_record.h"

#include <span>
#include <utility>

#include "lib/base/file.h"
#include "lib/base/json.h"
#include "lib/base/storage/storage.h"
#include "lib/base/text.h"

namespace reshard::tools {
namespace {

constexpr std::string_view kRecord = ".reshard-watch.json";
constexpr Index kMaxRecordBytes = Index{64} << 20;

Status read_steps(const Json& json, std::map<std::string, StepRecord>& out) {
  const std::span<const Json::Member> steps = TRY(json.get_object("steps"));
  for (const Json::Member& step : steps) {
    StepRecord& record = out[step.key];
    record.source = TRY(step.value.get_string("source"));
    record.proven = TRY(step.value.get_bool("proven"));
    record.then_succeeded = TRY(step.value.get_bool("then"));
    record.lacks_optimizer = step.value.contains("without_optimizer");
    record.rewriting = step.value.contains("rewriting");
    record.replaced = step.value.contains("replaced");
  }
  return {};
}

// Returns the members of an object that records of earlier versions lack.
Result<std::span<const Json::Member>> members_of(const Json& json, std::string_view name) {
  if (!json.contains(name)) return std::span<const Json::Member>();
  return json.get_object(name);
}

Status read_started(const Json& json, std::map<std::string, std::string>& out) {
  const std::span<const Json::Member> started = TRY(members_of(json, "started"));
  for (const Json::Member& step : started) out[step.key] = TRY(step.value.as_string());
  return {};
}

Status read_files(const Json& json, std::map<std::string, DataFile>& out) {
  const std::span<const Json::Member> files = TRY(members_of(json, "files"));
  for (const Json::Member& file : files) {
    DataFile& data = out[file.key];
    data.path = TRY(file.value.get_string("path"));
    data.size = TRY(file.value.get_index("size"));
    data.mtime_ns = TRY(file.value.get_index("mtime_ns"));
  }
  return {};
}

}  // namespace

Result<WatchRecord> WatchRecord::read(const std::string& directory) {
  WatchRecord out;
  out.path = path_join(directory, kRecord);
  if (!TRY(path_exists(out.path))) return out;
  const Json json = TRY(parse_json(TRY(read_whole_file(out.path, kMaxRecordBytes)), out.path));
  TRY(read_steps(json, out.steps).context(out.path));
  TRY(read_started(json, out.started).context(out.path));
  TRY(read_files(json, out.files).context(out.path));
  return out;
}

Status WatchRecord::write() const {
  Json json_steps = Json::object(), json_started = Json::object(), json_files = Json::object();
  for (const auto& [name, step] : steps) {
    Json json = Json::object();
    json.set("source", step.source).set("proven", step.proven).set("then", step.then_succeeded);
    if (step.lacks_optimizer) json.set("without_optimizer", true);
    if (step.rewriting) json.set("rewriting", true);
    if (step.replaced) json.set("replaced", true);
    json_steps.set(name, std::move(json));
  }
  for (const auto& [name, source] : started) json_started.set(name, source);
  for (const auto& [name, file] : files)
    json_files.set(name, Json::object().set("path", file.path).set("size", file.size).set("mtime_ns", file.mtime_ns));
  Json json = Json::object();
  json.set("steps", std::move(json_steps)).set("started", std::move(json_started)).set("files", std::move(json_files));
  return replace_file(path, to_text(json, 1) + "\n");
}

const StepRecord* WatchRecord::find(const std::string& step) const {
  const auto found = steps.find(step);
  return found == steps.end() ? nullptr : &found->second;
}

StepRecord* WatchRecord::find(const std::string& step) {
  const auto found = steps.find(step);
  return found == steps.end() ? nullptr : &found->second;
}

bool is_unfinished_record(std::string_view name) {
  return name.starts_with(".reshard-watch") && name.find(".json.partial-") != std::string_view::npos;
}

}  // namespace reshard::tools
