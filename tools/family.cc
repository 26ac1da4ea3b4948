// SPDX-License-Identifier: Apache-2.0
// reshard family: makes a table of a model class of the user's own, by running its Python code.
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "lib/base/file.h"
#include "lib/base/text.h"
#include "lib/model/architecture.h"
#include "tools/child.h"
#include "tools/commands.h"
#include "tools/family_script.h"
#include "tools/job_options.h"
#include "tools/outputs.h"

namespace reshard::tools {
namespace {

constexpr Index kMaxTable = Index{4} << 20;  // bytes, as of --family-file

struct FamilyOptions {
  std::string from, table, python = "python3";
};

// A directory for temporary files, removed at the end.
class TemporaryDirectory {
 public:
  static Result<TemporaryDirectory> make() {
    std::string path = path_join(temporary_directory(), "reshard-family-XXXXXX");
    if (!::mkdtemp(path.data())) return io_error(printable(path) + ": " + std::strerror(errno));
    return TemporaryDirectory(std::move(path));
  }
  TemporaryDirectory(TemporaryDirectory&& other) noexcept : path_(std::exchange(other.path_, "")) {}
  TemporaryDirectory& operator=(TemporaryDirectory&&) = delete;
  ~TemporaryDirectory() {
    if (!path_.empty()) (void)remove_tree(path_);
  }
  std::string file(std::string_view name) const { return path_join(path_, name); }

 private:
  explicit TemporaryDirectory(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

// Runs the script with a Python of the user's, which imports the code in `o.from`. Returns the table.
Result<std::string> derive(const FamilyOptions& o, const TemporaryDirectory& temporary) {
  const std::string script = temporary.file("architectures.py"), table = temporary.file("table.json");
  TRY(replace_file(script, family_script()));
  std::vector<std::string> variables = {"HF_MODULES_CACHE=" + temporary.file("modules"), "PYTHONWARNINGS=ignore",
                                        "TRANSFORMERS_VERBOSITY=critical"};
  if (!std::getenv("HF_HUB_OFFLINE")) variables.emplace_back("HF_HUB_OFFLINE=1");  // runs no code from elsewhere
  const auto code = run_child({o.python, script, o.from, table}, OnInterrupt::kEndChild, variables);
  if (!code)
    return Error(code.error().code(), code.error().message() + "; give a Python that has transformers with --python");
  if (interrupted()) return io_error("interrupted");
  if (*code != 0 || !TRY(path_exists(table)))
    return unsupported(printable(o.from) + ": no table was made of it; " + printable(o.python) + " says why above");
  return read_whole_file(table, kMaxTable);
}

Result<int> family(const FamilyOptions& o) {
  if (!TRY(is_directory(o.from))) return io_error(printable(o.from) + ": not found, or not a directory");
  if (!TRY(path_exists(path_join(o.from, "config.json"))))
    return io_error(printable(o.from) + ": no config.json, which names the classes of the model");
  (void)interrupted();  // from now on signals are noticed, so that the temporary files are removed
  const auto made = TRY(TemporaryDirectory::make());
  auto table = derive(o, made);
  if (interrupted()) return 128 + ending_signal();
  const std::string text = TRY(std::move(table));
  const std::string type = TRY(type_of_class_table(text, o.from));
  TRY(replace_report(o.table, kClassTable, text));
  std::printf("%s: table of model_type '%s'; use it with --family-file\n", printable(o.table).c_str(),
              printable(type).c_str());
  return 0;
}

}  // namespace

void add_family(CommandLine& line) {
  auto options = std::make_shared<FamilyOptions>();
  line.group("Source");
  line.add_option("TABLE", options->table, "File to write the table to, for --family-file")
      .written(kClassTable)
      .required();
  line.add_option("--from-transformers", options->from, "Model's directory; EXECUTES the Python code in it")
      .read()
      .takes("DIR")
      .required()
      .common();
  line.add_option("--python", options->python, "Python that has torch and transformers 5")
      .takes("PROGRAM")
      .shows_default()
      .common();
  line.examples({{"reshard family --from-transformers my-model my-model.json", ""},
                 {"reshard verify my-model --family-file my-model.json", ""}});
  line.description(
      "The table lists the names and shapes of the tensors of a model class that transformers lacks (remote code). The "
      "directory contains config.json and the modules that its auto_map names. This command executes the model's code "
      "without a sandbox, which no other command does. Use it only for code that you trust. It builds the class at "
      "many configs, without weights, and downloads nothing unless HF_HUB_OFFLINE=0 is set.");
  line.action([options] { return family(*options); });
}

}  // namespace reshard::tools
