// SPDX-License-Identifier: Apache-2.0
// reshard doctor: what this build can do on this machine, and what is wrong with the machine.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <thread>

#include "formats/registry.h"
#include "lib/base/file.h"
#include "lib/base/sandbox.h"
#include "lib/base/text.h"
#include "lib/transport/job.h"
#include "tools/build_parts.h"
#include "tools/commands.h"
#include "tools/job_options.h"

namespace reshard::tools {
namespace {

// One line of the report.
struct Fact {
  std::string name, text;
  std::string problem;  // what is wrong and what to do; empty: nothing
};

Fact fine(std::string name, std::string text) { return {std::move(name), std::move(text), {}}; }

// ---- memory

std::string first_line(const std::string& path) {
  constexpr Index kMost = 1 << 16;
  const auto text = read_whole_file(path, kMost);
  return text ? text->substr(0, text->find('\n')) : "";
}

// Returns the paths of the files that limit the memory of this process: those of its cgroup and of the cgroups above
// it.
std::vector<std::string> limit_files() {
  constexpr Index kMost = 1 << 16;
  const auto text = read_whole_file("/proc/self/cgroup", kMost);
  std::vector<std::string> out;
  for (const std::string& line : split(text ? std::string_view(*text) : "", '\n')) {
    const std::vector<std::string> parts = split(line, ':');
    if (parts.size() != 3) continue;
    const bool is_v2 = parts[1].empty();
    if (!is_v2 && parts[1] != "memory") continue;
    const std::string root = is_v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
    for (std::string group = parts[2];; group = parent_path(group)) {
      out.push_back(root + group + (is_v2 ? "/memory.max" : "/memory.limit_in_bytes"));
      if (group.size() <= 1) break;
    }
  }
  return out;
}

// Returns the smallest limit in bytes; nothing if there is none.
std::optional<Index> memory_of_cgroup() {
  constexpr Index kUnlimited = Index{1} << 60;  // version 1 has a number for it
  std::optional<Index> out;
  for (const std::string& file : limit_files())
    if (const auto limit = parse_number(first_line(file)); limit && *limit < out.value_or(kUnlimited)) out = *limit;
  return out;
}

Fact memory() {
  const auto installed = static_cast<Index>(::sysconf(_SC_PHYS_PAGES)) * static_cast<Index>(::sysconf(_SC_PAGESIZE));
  const std::optional<Index> limit = memory_of_cgroup();
  const std::string given = environment_variable("RESHARD_MEMORY"),
                    used = given.empty() ? ResourceOptions().memory : given;
  Fact out = fine("memory", human_bytes(installed) + (limit ? "; its cgroup may use " + human_bytes(*limit) : "") +
                                "; reshard uses at most " + used + (given.empty() ? "" : " ($RESHARD_MEMORY)"));
  const auto wanted = parse_bytes(used);
  if (!wanted)
    out.problem = "RESHARD_MEMORY='" + printable(given) + "' is not a size; set it to a size such as 2GiB, or unset it";
  else if (const Index there = std::min(limit.value_or(installed), installed); *wanted > there)
    out.problem =
        used + " is more than the " + human_bytes(there) + " available; set --memory or RESHARD_MEMORY to less";
  return out;
}

// ---- limits of the process

std::string limit_text(rlim_t limit) { return limit == RLIM_INFINITY ? "unlimited" : with_commas(limit); }

Fact open_files() {
  constexpr rlim_t kFew = 1024;
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  Fact out = fine("open files", limit_text(limit.rlim_max));
  if (limit.rlim_max < kFew)
    out.problem = "checkpoints of many files need more than " + limit_text(limit.rlim_max) +
                  " open files; ask the administrator to raise the hard limit (limits.conf, LimitNOFILE=)";
  return out;
}

Fact file_size() {
  rlimit limit{};
  ::getrlimit(RLIMIT_FSIZE, &limit);
  Fact out = fine("file size", limit_text(limit.rlim_cur));
  if (limit.rlim_cur != RLIM_INFINITY)
    out.problem =
        "no file may be larger than " + human_bytes(limit.rlim_cur) + "; remove the limit: ulimit -f unlimited";
  return out;
}

Fact address_space() {
  constexpr rlim_t kLittle = rlim_t{4} << 30;
  rlimit limit{};
  ::getrlimit(RLIMIT_AS, &limit);
  Fact out = fine("address space", limit.rlim_cur == RLIM_INFINITY ? "unlimited" : human_bytes(limit.rlim_cur));
  if (limit.rlim_cur < kLittle)
    out.problem = "worker threads reserve address space that they do not use; remove the limit: ulimit -v unlimited";
  return out;
}

Fact temporary_files() {
  const std::string directory = temporary_directory();
  const auto free = free_space(directory);
  Fact out = fine("temporary", printable(directory) + (free ? ", " + human_bytes(*free) + " free" : ""));
  if (::access(directory.c_str(), W_OK | X_OK) != 0)
    out.problem = printable(directory) + " is not a directory that can be written to; set TMPDIR to one";
  return out;
}

// ---- what commands need

bool is_program(const std::string& name) {
  const char* const path = process_environment("PATH");
  for (const std::string& directory : split(path ? path : "/usr/bin:/bin", ':'))
    if (::access(path_join(directory, name).c_str(), X_OK) == 0) return true;
  return false;
}

// Returns why `reshard mount` does not work although libfuse is installed; empty if it works.
std::string why_no_mount() {
  if (const auto there = path_exists("/dev/fuse"); !there.has_value() || !*there)
    return "there is no /dev/fuse; load the module fuse, or pass the device to the container";
  const int device = ::open("/dev/fuse", O_RDWR | O_CLOEXEC);
  if (device < 0) return "/dev/fuse cannot be opened; pass the device to the container, or ask for access to it";
  ::close(device);
  if (::geteuid() != 0 && !is_program("fusermount3")) return "fusermount3 is not on PATH; install the package fuse3";
  return "";
}

Fact mounting(const std::vector<BuildPart>& parts) {
  const auto fuse = std::find_if(parts.begin(), parts.end(), [](const BuildPart& p) { return p.name == "fuse"; });
  if (!fuse->version) return fine("mount", "does not work: FUSE is missing");
  const std::string why = why_no_mount();
  return fine("mount", why.empty() ? "works" : "does not work: " + why);
}

Fact sandbox() {
  const long version = landlock_version();
  return fine("sandbox", version > 0
                             ? "Landlock, version " + std::to_string(version)
                             : "without Landlock, which this kernel lacks or disables: only system calls are confined");
}

// A launcher whose ranks cannot reach each other is an error before any command begins (join_job).
Fact ranks() {
  const bool is_alone = detect_launch(process_environment) == Launch::kAlone;
  return fine("ranks", is_alone ? "one process" : "one of several, started by an MPI launcher");
}

// ---- the report

std::vector<Fact> facts_of_machine(const std::vector<BuildPart>& parts) {
  utsname system{};
  ::uname(&system);
  return {fine("system", std::string(system.sysname) + " " + system.release + ", " + system.machine),
          fine("cores", std::to_string(std::max(1U, std::thread::hardware_concurrency()))),
          memory(),
          open_files(),
          file_size(),
          address_space(),
          temporary_files(),
          mounting(parts),
          sandbox(),
          ranks()};
}

std::vector<std::string> problems_of(const std::vector<Fact>& facts) {
  std::vector<std::string> out;
  for (const Fact& fact : facts)
    if (!fact.problem.empty()) out.push_back(fact.name + ": " + fact.problem);
  return out;
}

// Returns the versions of the libraries that formats use: "HDF5 1.10.8", ...
std::vector<std::string> format_libraries() {
  std::vector<std::string> out;
  for (const Format* f : formats())
    if (f->library) out.push_back(f->library());
  return out;
}

// Returns the error of a missing part without the part's name.
std::string why_missing(const BuildPart& part) {
  const std::string why = printable(part.version.error().message()), name = part.name + ": ";
  return why.starts_with(name) ? why.substr(name.size()) : why;
}

void print_facts(const std::string& title, const std::vector<Fact>& facts) {
  constexpr std::size_t kTitle = 10, kName = 15;
  for (std::size_t i = 0; i < facts.size(); ++i)
    std::printf("%s%s%s\n", colored(padded(i == 0 ? title : "", kTitle), "1").c_str(),
                padded(facts[i].name, kName).c_str(), in_column(facts[i].text, kTitle + kName).c_str());
}

void print_text(const std::vector<BuildPart>& parts, const std::vector<Fact>& machine) {
  std::vector<Fact> build;
  build.push_back(fine("reshard", RESHARD_VERSION));
  for (const std::string& library : format_libraries()) {
    const std::size_t space = library.find(' ');
    build.push_back(fine(library.substr(0, space), space == library.npos ? "found" : library.substr(space + 1)));
  }
  for (const BuildPart& part : parts)
    build.push_back(fine(part.name, part.version ? *part.version : "missing: " + why_missing(part)));
  print_facts("build", build);
  print_facts("machine", machine);
  const std::vector<std::string> problems = problems_of(machine);
  for (const std::string& problem : problems) {
    const std::string label = padded("problem", 10);
    std::printf("%s%s\n", colored(label, "1;31").c_str(), in_column(problem, label.size()).c_str());
  }
  std::printf("%s\n", problems.empty() ? "no problems found" : count_of(std::ssize(problems), "problem").c_str());
}

Json to_json(const std::vector<BuildPart>& parts, const std::vector<Fact>& machine) {
  Json build = Json::object(), facts = Json::object(), problems = Json::array(), libraries = Json::array();
  for (const std::string& library : format_libraries()) libraries.push_back(library);
  for (const BuildPart& part : parts)
    build.set(part.name, part.version ? Json::object().set("found", *part.version)
                                      : Json::object().set("missing", why_missing(part)));
  for (const Fact& fact : machine) facts.set(fact.name, fact.text);
  for (const std::string& problem : problems_of(machine)) problems.push_back(problem);
  return answer_json("doctor")
      .set("version", RESHARD_VERSION)
      .set("build", std::move(build))
      .set("libraries", std::move(libraries))
      .set("machine", std::move(facts))
      .set("problems", std::move(problems));
}

Result<int> doctor(bool as_json) {
  const std::vector<BuildPart> parts = build_parts();
  const std::vector<Fact> machine = facts_of_machine(parts);
  if (as_json)
    show_json(to_json(parts, machine), 2);
  else
    print_text(parts, machine);
  return problems_of(machine).empty() ? 0 : 1;
}

}  // namespace

void add_doctor(CommandLine& line) {
  auto as_json = std::make_shared<bool>(false);
  line.group("Report");
  line.add_flag("--json", *as_json, "Print the report as JSON").common();
  line.examples({{"reshard doctor", ""}, {"reshard doctor --json", "to attach to a bug report"}});
  line.description("Exits with 1 if something is wrong with the machine. A missing optional part is not a problem.");
  line.action([as_json] { return doctor(*as_json); });
}

}  // namespace reshard::tools
