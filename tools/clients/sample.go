// Ask by the client that openapi-generator made for Go, and print the one number of the output of raw attention.
// The server's facts hold numbers of 64 bits, and a module's spec the unions that a field tells apart.
package main

import (
	"context"
	"fmt"
	"log"
	"os"

	openapi "github.com/client/attention"
)

func tensor(rows ...interface{}) openapi.Tensor {
	return openapi.ArrayOfAnyAsTensor(&rows)
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func main() {
	settings := openapi.NewConfiguration()
	settings.Servers = openapi.ServerConfigurations{{URL: os.Args[1]}}
	request := openapi.NewRawForwardRequest(tensor([]float64{1, 0}))
	request.SetKey(tensor([]float64{0, 0}, []float64{0, 0}))
	request.SetValue(tensor([]float64{1}, []float64{3}))

	client, ctx := openapi.NewAPIClient(settings), context.Background()
	facts, _, err := client.ServerAPI.ServerInfo(ctx).Execute()
	check(err)
	if facts.Limits.MemoryBudgetBytes <= 0 {
		log.Fatal("no budget")
	}
	create := openapi.NewCreateModule("generated", *openapi.NewModuleConfigInput(8, 2))
	module, _, err := client.ModulesAPI.CreateModule(ctx).CreateModule(*create).Execute()
	check(err)
	if module.Config.Spec.Score.ScaledDot == nil || module.Config.Spec.Normalizer.Softmax == nil {
		log.Fatal("not the defaults of a spec")
	}
	reply, _, err := client.RawAttentionAPI.RawForward(ctx).RawForwardRequest(*request).Execute()
	check(err)
	output := reply.GetOutput()
	fmt.Println((*output.ArrayOfAny)[0].([]interface{})[0])
}
